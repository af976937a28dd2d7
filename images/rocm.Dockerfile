# AMD GPUs. torch with ROCm and RCCL comes with the base image and stays unchanged: choose one with Python 3.11 or newer
# and a torch that the project takes (pyproject.toml), or the build fails.
#   docker build -f images/rocm.Dockerfile --build-arg BASE=rocm/pytorch:TAG -t REGISTRY/slipstream:rocm .
ARG BASE=rocm/pytorch:latest
FROM ${BASE}

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 ORT_DISABLE_TELEMETRY=1
# Where Flyte unpacks registered code, over the image's own, and from where it runs: uid 1000 has to write there.
WORKDIR /root
COPY pyproject.toml constraints.txt images/requirements.py ./
RUN python requirements.py torch \
    && python -m pip install --constraint image-constraints.txt --requirement image-requirements.txt \
    && python -c 'import torch; assert torch.version.hip, f"torch {torch.__version__} was built without ROCm"'
# Some bases have a user 1000 already.
RUN (getent passwd 1000 || useradd --uid 1000 flyte) \
    && mkdir --parents /home/flyte && chown 1000 /home/flyte /root

COPY --chown=1000 README.md LICENSE ./
COPY --chown=1000 slipstream slipstream
COPY --chown=1000 tasks tasks
COPY --chown=1000 workflows workflows
RUN python -m pip install --no-deps --editable .
# Only slipstream is installed: tasks and workflows are found here.
ENV HOME=/home/flyte PYTHONPATH=/root
# Keeps the digests of the sources, or every pod would parse them again.
RUN python -c "import workflows.training" && chown --recursive 1000 /home/flyte
USER 1000
