# The service for CUDA machines; `docker build --target cpu .` makes the one for CPUs.
# Checkpoints are mounted at /weights; the link `current` names the one to serve.
FROM python:3.11.13-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# g++ stays in the final image: the CPU kernel is compiled for the processor it meets, and Triton compiles its launchers.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Every package is the locked one, and each file is checked against its hash (.ci/install).
FROM base AS build
ARG TORCH=2.13.0
# The image is read-only: what is not compiled now would be compiled at every start.
ENV UV_COMPILE_BYTECODE=1
WORKDIR /build
RUN python -m venv /opt/ranker
COPY docker/requirements.lock docker/
COPY .ci/install .ci/
COPY pyproject.toml LICENSE ./
COPY app app
COPY model model
COPY weights weights
RUN touch README.md

FROM build AS build-cuda
ARG TORCH_BACKEND=cu130
ARG EXTRAS=redis,served,tracing
RUN TORCH_BACKEND=$TORCH_BACKEND .ci/install /opt/ranker $EXTRAS --no-editable

FROM build AS build-cpu
ARG TORCH_BACKEND=cpu
ARG EXTRAS=redis,served,tracing
RUN TORCH_BACKEND=$TORCH_BACKEND .ci/install /opt/ranker $EXTRAS --no-editable

FROM base AS runtime
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="phoenix-ranking-server" \
      org.opencontainers.image.description="Online ranking of feed candidates by a Grok transformer" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
RUN useradd --uid 10001 --user-group --create-home --home-dir /home/ranker --shell /usr/sbin/nologin ranker \
    && install -d -m 0700 -o ranker -g ranker /home/ranker/.cache
# RANKER_HOST=*: every address, IPv4 and IPv6.
ENV PATH=/opt/ranker/bin:$PATH \
    HOME=/home/ranker \
    PYTHONDONTWRITEBYTECODE=1 \
    TRITON_CACHE_DIR=/home/ranker/.cache/triton \
    RANKER_HOST=* \
    RANKER_PORT=8000 \
    RANKER_CHECKPOINT=/weights/current
WORKDIR /home/ranker
# Compiled kernels are the only thing that is written, so the root file system can be read-only.
VOLUME /home/ranker/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=4s --start-period=120s --retries=3 CMD ["python", "-m", "app.healthcheck"]
ENTRYPOINT ["python", "-m", "app"]

FROM runtime AS cpu
ENV RANKER_DEVICE=cpu
COPY --from=build-cpu /opt/ranker /opt/ranker
USER 10001:10001

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility RANKER_DEVICE=cuda
COPY --from=build-cuda /opt/ranker /opt/ranker
USER 10001:10001
