"""Proofs that a user runs: the rehearsal of a profile, the proof on a cluster, the checks of a GPU.

Loaded on demand. The rehearsal and the proof on a cluster run in a clone of the project; the rehearsal needs moto.
"""
