"""Command line of the doctor; does not import Flyte, which takes seconds and needs a profile."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from slipstream.operations.doctor.findings import DoctorReport
from slipstream.shared.errors import UserError


@click.command()
@click.argument("package", required=False, type=click.Path(path_type=Path))
@click.option(
    "--limits", type=click.Path(path_type=Path), help="TOML with [limits] cpu, memory, gpu, ephemeral_storage."
)
@click.option(
    "--trained", type=click.Path(path_type=Path), help="Trained model whose record has the duration of a save."
)
@click.option("--profile", default="", help="With a directory of manifests: profile that they must fit.")
@click.option("--node", is_flag=True, help="Check this machine instead.")
@click.option("--store", default="", help="With --node: directory or URI whose speed is measured.")
@click.option("--endpoint", default="", help="With --node: HTTP(S) address to compare the clock with.")
def main(
    package: Path | None, limits: Path | None, trained: Path | None, profile: str, node: bool, store: str, endpoint: str
) -> None:
    """Report problems of a PACKAGE on the cluster of kubectl's context, of a directory of manifests, or of this node.

    Exits with 1 if something will fail.

    \b
    Example: slipstream doctor flyte-package.tgz --limits cluster.toml
             slipstream doctor manifests --profile a100-spot
             slipstream doctor --node --store s3://flyte
    """  # noqa: D301 - click needs the escape
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else None
    if node:
        if package or limits or trained or profile:
            raise UserError("--node: checks this machine only; remove PACKAGE, --limits, --trained and --profile")
        from slipstream.operations.doctor.findings import readings_text
        from slipstream.operations.doctor.node import read_node

        click.echo(readings_text(read_node(store, endpoint), width))
        return
    if package is None or store or endpoint:
        raise UserError(
            "expected PACKAGE.tgz, an archive of `pyflyte package`; or --node [--store URI] [--endpoint URL]"
        )
    if profile or package.is_dir():
        click.echo((fitting := check_directory(package, profile, bool(limits or trained))).text(width))
        sys.exit(int(fitting.failed))
    from slipstream.operations.doctor.archive import LimitsFile, read_package
    from slipstream.operations.doctor.cluster import check_cluster
    from slipstream.operations.doctor.kubectl import kubectl
    from slipstream.operations.doctor.package import SaveTime, check_package, measured_save
    from slipstream.operations.doctor.propeller import admin_limits

    packaged = read_package(package)
    dockerfiles = sorted(package.parent.glob("images/*.Dockerfile"))
    report = check_package(
        packaged,
        LimitsFile.from_toml(limits).limits if limits else admin_limits(kubectl),
        measured_save(trained) if trained else SaveTime(),
        dockerfiles,
    )
    report += check_cluster(packaged)
    click.echo(report.text(width))
    sys.exit(int(report.failed))


def check_directory(directory: Path, profile: str, of_package: bool) -> DoctorReport:
    """Check the manifests in a directory.

    ``of_package`` is True if options for packages were given, which is an error.
    """
    from slipstream.operations.doctor.manifests import check_manifests
    from slipstream.operations.doctor.objects import read_manifests
    from slipstream.shared.profiles.profile import load_profile

    if not directory.is_dir():
        raise UserError(f"{directory}: no directory of manifests; expected one with --profile, or leave --profile out")
    if not profile:
        raise UserError(
            f"{directory}: is a directory; expected --profile for one of manifests, or the archive of a package"
        )
    if of_package:
        raise UserError("--profile: is for a directory of manifests; remove --limits and --trained")
    return check_manifests(read_manifests(directory), load_profile(profile))
