# AMD GPUs. torch with ROCm and RCCL comes with the base image (choose one with the torch of the constraints); the
# constraints' own torch line is left out so that pip does not replace it.
#   docker build -f images/rocm.Dockerfile --build-arg BASE=rocm/pytorch:TAG -t slipstream:rocm .
ARG BASE=rocm/pytorch:latest
FROM ${BASE}

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /slipstream
COPY pyproject.toml constraints.txt README.md ./
COPY tasks tasks
COPY workflows workflows
RUN grep -v '^torch==' constraints.txt > constraints-rocm.txt \
    && pip install --constraint constraints-rocm.txt --editable . \
    && (id flyte 2>/dev/null || useradd --create-home flyte) \
    && chown -R flyte /slipstream
USER flyte
