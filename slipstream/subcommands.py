"""Subcommands of ``slipstream``, which click lists without importing them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import NamedTuple

import click

from slipstream.errors import UserError


class Subcommand(NamedTuple):
    """Module whose ``main`` runs a subcommand, and its summary in ``slipstream --help``."""

    module: str
    summary: str


SUBCOMMANDS = {
    "train": Subcommand("slipstream.train.command", "Train on prepared data under torchrun, without Flyte."),
    "collectives": Subcommand("slipstream.collectives.command", "Measure the interconnect, compare it, tune it."),
    "sweep": Subcommand("slipstream.sweep.command", "List the trials of a sweep."),
    "checkpoints": Subcommand("slipstream.train.checkpoint.command", "List checkpoints of trainings, delete old ones."),
    "telemetry": Subcommand(
        "slipstream.telemetry.view.command", "Show devices, ranks and the bottleneck of a training."
    ),
    "profiles": Subcommand("slipstream.profiles.command", "Show the resources that every stage requests."),
    "plan": Subcommand("slipstream.plan.command", "Estimate time and cost of training and serving."),
    "memory": Subcommand("slipstream.train.memory.command", "Estimate the memory of every device in advance."),
    "manifests": Subcommand("slipstream.manifests.command", "Write cluster manifests for a profile: nodes, queues."),
    "registry": Subcommand("slipstream.promote.store", "List the promotions of a registry, fetch the model."),
    "score": Subcommand("slipstream.score.command", "List the scored tables of an output, fetch the newest."),
    "check": Subcommand("slipstream.export.check", "Check an exported model on the serving machine."),
    "sign": Subcommand("slipstream.export.package.sign", "Sign an exported model."),
    "triton": Subcommand("slipstream.export.package.triton", "Add an exported model to a Triton repository."),
    "hugging-face": Subcommand(
        "slipstream.models.hugging_face.command", "Write a transformer in Hugging Face's format."
    ),
    "doctor": Subcommand("slipstream.doctor.command", "Diagnose a package, a cluster or a node."),
    "schedules": Subcommand("workflows.schedules.command", "Show the schedules of an environment."),
    "schema": Subcommand("slipstream.schema", "Print the JSON Schema of run.yaml, for editors."),
    "rehearse": Subcommand("slipstream.proofs.rehearsal.command", "Run a profile's workflow locally, pod by pod."),
    "cluster-proof": Subcommand("slipstream.proofs.cluster.command", "Test this project's guarantees on your cluster."),
    "gpu-proof": Subcommand("slipstream.proofs.gpu.command", "Run the checks that need this machine's GPUs."),
}


class Subcommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand. Raises ``UserError`` if it belongs to a part of the project that is not installed."""
        if cmd_name not in SUBCOMMANDS:
            return None
        module = SUBCOMMANDS[cmd_name].module
        if not module.startswith("slipstream."):
            # Only then: elsewhere a command must not import files of the working directory.
            sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.import_module(module).main
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            raise UserError(
                f"slipstream {cmd_name}: the directory {error.name} is missing here; run the command in a clone of "
                "the project"
            ) from None
        if "torch" in sys.modules:
            from slipstream.machine.torch_versions import warn_if_untested

            warn_if_untested()
        # A module without click parses its arguments itself.
        return found if isinstance(found, click.Command) else click.Command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, known.summary) for name, known in SUBCOMMANDS.items()])


@click.group(cls=Subcommands)
def slipstream() -> None:
    """From raw data to a quantised, measured, deployable model.

    The workflows are run by pyflyte, see the README; these commands do the rest.

    Completion: eval "$(_SLIPSTREAM_COMPLETE=bash_source slipstream)", or zsh_source, fish_source.
    """
