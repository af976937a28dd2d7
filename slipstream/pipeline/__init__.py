"""Stages of the pipeline, from raw data to a model in service."""
