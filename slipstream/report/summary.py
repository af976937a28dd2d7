"""What a workflow returns: ``pyflyte run`` prints it after everything else."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.artifacts.results.compression import Compression
from slipstream.report import terminal_summary
from slipstream.report.figures import DataRunFigures, ExportFigures, RunFigures


@dataclass(frozen=True)
class RunSummary(RunFigures):
    """The figures of a whole run. ``str`` gives the summary for the terminal."""

    def __str__(self) -> str:
        return terminal_summary.of_run(self)


@dataclass(frozen=True)
class DataSummary(DataRunFigures):
    """The figures of a run that only prepares. ``str`` gives the summary for the terminal."""

    def __str__(self) -> str:
        return terminal_summary.of_data(self)


@dataclass(frozen=True)
class ExportSummary(ExportFigures):
    """The figures of a run that only exports. ``str`` gives the summary for the terminal."""

    def __str__(self) -> str:
        return terminal_summary.of_export(self)


@dataclass(frozen=True)
class CompressionSummary:
    """A trained network that was to become smaller. ``str`` gives the summary for the terminal."""

    compression: Compression

    def __str__(self) -> str:
        return terminal_summary.of_compression(self.compression)


@dataclass(frozen=True)
class NetworkSummary:
    """A measurement of the interconnect alone. ``str`` gives the table for the terminal."""

    #: Where page and profile are: ``runs/<timestamp>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``.
    page: str
    profile: str
    #: All measurements in the columns of nccl-tests.
    table: str

    def __str__(self) -> str:
        return f"{self.table}\n\nReport      {self.directory}/{self.page}\nProfile     {self.directory}/{self.profile}"


@dataclass(frozen=True)
class TuningSummary:
    """Settings with which training steps are faster, or none. ``str`` gives them for the terminal."""

    #: Where page and result are: ``runs/<timestamp>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``.
    page: str
    tuning: str
    #: The recommendation with lines to paste, and what was tried.
    text: str

    def __str__(self) -> str:
        return f"{self.text}\n\nReport      {self.directory}/{self.page}\nTuning      {self.directory}/{self.tuning}"
