"""Trials of a compression, by their answers."""

from slipstream.shared.artifacts.results.compression import CompressionTrial, ModelSize


def tried(candidate: int, answer: str, seconds: float = 1.0) -> CompressionTrial:
    return CompressionTrial(candidate, str(candidate), ModelSize(10, [1]), 0.9, 0.0, 0.0, 0.0, 100, answer, seconds)
