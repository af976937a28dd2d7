# CPUs only. TORCH_WHEELS is where pip finds torch's CPU wheel (an index or a folder); without it the image works too,
# with a few gigabytes of CUDA libraries that it never uses.
#   docker build -f images/cpu.Dockerfile --build-arg TORCH_WHEELS=URL -t localhost:30000/slipstream:v1 .
FROM python:3.11-slim-bookworm

ARG TORCH_WHEELS=""
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 ORT_DISABLE_TELEMETRY=1
# Where Flyte unpacks registered code, over the image's own, and from where it runs: uid 1000 has to write there.
WORKDIR /root
COPY pyproject.toml constraints.txt images/requirements.py ./
RUN python requirements.py \
    && python -m pip install ${TORCH_WHEELS:+--extra-index-url "$TORCH_WHEELS"} \
        --constraint image-constraints.txt --requirement image-requirements.txt
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
