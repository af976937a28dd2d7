"""Subcommands of ``slipstream``, which click lists without importing them, as far as they work here."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click

from slipstream.shared.errors import UserError


class Subcommand(NamedTuple):
    """Module whose ``main`` runs a subcommand, its summary in ``slipstream --help``, and its requirements."""

    module: str
    summary: str
    #: Package that only this extra of the distribution installs.
    package: str = ""
    extra: str = ""
    #: True if it needs the workflows of the project, which are not installed.
    in_clone: bool = False

    def lacks(self) -> str:
        """Return what is missing here for the subcommand and where to get it; empty if it works."""
        if self.in_clone and not Path(CLONE).is_file():
            return "the directory workflows is missing here; run the command in a clone of the project"
        if self.package and find_spec(self.package) is None:
            return f"the package {self.package} is missing; pip install -e '.[{self.extra}]'"
        return ""


#: File that every clone of the project has in its root, and no other project.
CLONE = "workflows/schedules/command.py"


SUBCOMMANDS = {
    "train": Subcommand("slipstream.pipeline.train.command", "Train on prepared data under torchrun, without Flyte."),
    "collectives": Subcommand(
        "slipstream.pipeline.collectives.command", "Measure the interconnect, compare it, tune it."
    ),
    "runs": Subcommand("slipstream.pipeline.report.runs", "List runs with their metric and changed settings."),
    "compare": Subcommand("slipstream.pipeline.report.compare", "Compare runs: settings, metrics, times, curves."),
    "sweep": Subcommand("slipstream.pipeline.sweep.command", "List the trials of a sweep."),
    "checkpoints": Subcommand(
        "slipstream.pipeline.train.checkpoint.command", "List checkpoints of trainings, delete old ones."
    ),
    "telemetry": Subcommand(
        "slipstream.shared.telemetry.view.command", "Show devices, ranks and the bottleneck of a training."
    ),
    "profiles": Subcommand("slipstream.shared.profiles.command", "Show the resources that every stage requests."),
    "plan": Subcommand("slipstream.operations.plan.command", "Estimate time and cost of training and serving."),
    "memory": Subcommand("slipstream.pipeline.train.memory.command", "Estimate the memory of every device in advance."),
    "manifests": Subcommand(
        "slipstream.operations.manifests.command", "Write cluster manifests for a profile: nodes, queues."
    ),
    "registry": Subcommand("slipstream.pipeline.promote.store", "List the promotions of a registry, fetch the model."),
    "score": Subcommand("slipstream.pipeline.score.command", "List the scored tables of an output, fetch the newest."),
    "check": Subcommand("slipstream.pipeline.export.check", "Check an exported model on the serving machine."),
    "sign": Subcommand("slipstream.pipeline.export.package.sign", "Sign an exported model.", "cryptography", "sign"),
    "triton": Subcommand("slipstream.pipeline.export.package.triton", "Add an exported model to a Triton repository."),
    "hugging-face": Subcommand(
        "slipstream.pipeline.export.hugging_face", "Write a transformer in Hugging Face's format."
    ),
    "generate": Subcommand(
        "slipstream.pipeline.export.generate", "Generate text with an exported transformer.", "transformers", "text"
    ),
    "doctor": Subcommand("slipstream.operations.doctor.command", "Diagnose a package, a cluster or a node."),
    "schedules": Subcommand("workflows.schedules.command", "Show the schedules of an environment.", in_clone=True),
    "versions": Subcommand("slipstream.versions", "Print the libraries of this image, for a profile."),
    "schema": Subcommand("slipstream.schema", "Print the JSON Schema of run.yaml, for editors."),
    "rehearse": Subcommand(
        "slipstream.operations.proofs.rehearsal.command",
        "Run a profile's workflow locally, pod by pod.",
        package="moto",
        extra="dev",
        in_clone=True,
    ),
    "cluster-proof": Subcommand(
        "slipstream.operations.proofs.cluster.command", "Test this project's guarantees on your cluster.", in_clone=True
    ),
    "gpu-proof": Subcommand(
        "slipstream.operations.proofs.gpu.command", "Run the checks that need this machine's GPUs."
    ),
}


class Subcommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, known in SUBCOMMANDS.items() if not known.lacks()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand. Raises ``UserError`` if something is missing here for it."""
        known = SUBCOMMANDS.get(cmd_name)
        if known is None:
            return None
        if lacks := known.lacks():
            raise UserError(f"slipstream {cmd_name}: {lacks}")
        if known.in_clone:
            # Only then: elsewhere a command must not import files of the working directory.
            sys.path.insert(0, str(Path.cwd()))
        found = importlib.import_module(known.module).main
        if "torch" in sys.modules:
            from slipstream.shared.machine.torch_versions import warn_if_untested

            warn_if_untested()
        # A module without click parses its arguments itself.
        return found if isinstance(found, click.Command) else click.Command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUBCOMMANDS[name].summary) for name in self.list_commands(ctx)])


@click.group(cls=Subcommands)
def slipstream() -> None:
    """From raw data to a quantised, measured, deployable model.

    The workflows are run by pyflyte, see the README; these commands do the rest.

    Completion: eval "$(_SLIPSTREAM_COMPLETE=bash_source slipstream)", or zsh_source, fish_source.
    """
