"""Parallel layouts: ZeRO by FSDP2, hybrid sharding, tensor, sequence and pipeline parallelism.

They can be combined. :class:`~slipstream.train.parallel.layout.Layout` assigns mesh coordinates to processes, and
:func:`~slipstream.train.parallel.divide.divide_model` divides a model by a layout.
"""
