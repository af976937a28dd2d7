# NVIDIA GPUs. The torch wheel of the constraints brings CUDA and NCCL with it, so the base stays a plain Python.
#   docker build -f images/cuda.Dockerfile -t slipstream:cuda .
FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /slipstream
COPY pyproject.toml constraints.txt README.md ./
COPY tasks tasks
COPY workflows workflows
RUN pip install --constraint constraints.txt --editable . \
    && useradd --create-home --uid 1000 flyte \
    && chown -R flyte /slipstream
USER flyte
