"""A network profile as a table of plain text."""

from __future__ import annotations

from tasks.artifacts.network_figures import NetworkProfile


def table(profile: NetworkProfile) -> str:
    """The measurements as a plain text table; the columns are those of nccl-tests and the percentiles."""
    nodes = "" if profile["nodes"] == 1 else f" on {profile['nodes']} nodes"
    head = f"{profile['world']} processes{nodes}, {profile['backend']}, {profile['device']}, torch {profile['torch']}"
    columns = ("operation", "bytes", "runs", "p10 us", "p50 us", "p99 us", "algbw GB/s", "busbw GB/s")
    lines = [head, f"{columns[0]:<15}" + "".join(f"{name:>12}" for name in columns[1:])]
    for m in profile["measurements"]:
        lines.append(
            f"{m['operation']:<15}{m['bytes']:>12}{m['iterations']:>12}{m['p10_us']:>12.1f}{m['p50_us']:>12.1f}"
            f"{m['p99_us']:>12.1f}{m['algbw_gbps']:>12.3f}{m['busbw_gbps']:>12.3f}"
        )
    return "\n".join(lines)
