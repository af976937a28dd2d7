# NVIDIA GPUs. The torch wheel of the constraints brings CUDA and NCCL with it, so the base stays a plain Python. It is
# built for CUDA 13, which takes a driver of 580 or newer on the nodes. EFA is a version of AWS's installer (such as
# 1.47.0, https://efa-installer.amazonaws.com): the profile h100-efa-spot needs its libfabric and NCCL plugin.
#   docker build -f images/cuda.Dockerfile [--build-arg EFA=VERSION] -t REGISTRY/slipstream:cuda .
FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 ORT_DISABLE_TELEMETRY=1
# Where Flyte unpacks registered code, over the image's own, and from where it runs: uid 1000 has to write there.
WORKDIR /root
# Missing in wheels: NCCL loads libibverbs and its drivers, without which it falls back to sockets instead of InfiniBand and
# RoCE; Triton compiles what starts its kernels, for training.compile.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc ibverbs-providers libc6-dev libibverbs1 librdmacm1 \
    && rm --recursive /var/lib/apt/lists/*
# AWS's plugin is linked to where the loader looks, under the name that NCCL looks for; the build fails without it.
ARG EFA=""
RUN if [ -n "$EFA" ]; then \
        apt-get update && apt-get install --yes --no-install-recommends ca-certificates curl \
        && curl --fail --location "https://efa-installer.amazonaws.com/aws-efa-installer-$EFA.tar.gz" | tar -xz -C /tmp \
        && cd /tmp/aws-efa-installer && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \
        && plugin="$(find /opt/amazon -name 'libnccl-net*.so' | head -n 1)" && test -n "$plugin" \
        && ln --symbolic --force "$plugin" /usr/local/lib/libnccl-net.so && ldconfig \
        && cd / && rm --recursive /tmp/aws-efa-installer /var/lib/apt/lists/*; \
    fi
COPY pyproject.toml constraints.txt images/requirements.py ./
RUN python requirements.py \
    && python -m pip install --constraint image-constraints.txt --requirement image-requirements.txt \
    && python -c 'import torch; assert torch.version.cuda, f"torch {torch.__version__} was built without CUDA"'
RUN useradd --create-home --uid 1000 flyte && chown 1000 /root

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
