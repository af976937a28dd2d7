"""Proofs that a user runs: the rehearsal of a profile, the proof on a cluster, the checks of a GPU.

The commands load them on demand. They need more than the engines: the rehearsal and the proof on a cluster run in a
clone of the project, and the rehearsal needs moto.
"""
