"""Parallel layouts: ZeRO by FSDP2, hybrid sharding, tensor, sequence and pipeline parallelism.

They can be combined. :class:`~slipstream.pipeline.train.parallel.layout.Layout` assigns mesh coordinates to processes,
and :func:`~slipstream.pipeline.train.parallel.divide.divide_model` divides a model by a layout.
"""
