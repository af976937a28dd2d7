"""Layouts of parallel training: ZeRO by FSDP2, hybrid sharding, tensor and sequence parallelism, pipelines, and their
products.

:class:`~slipstream.train.parallel.layout.Layout` says which process has which part,
:func:`~slipstream.train.parallel.divide.divide` divides a model by it.
"""
