# The service for CUDA machines; `docker build --target cpu .` makes the one for CPUs. Checkpoints are mounted at /weights; the link `current` names the one to serve.
# The interpreter is the one for which docker/requirements.lock is resolved. CUDA's libraries come as wheels, with torch's.
FROM python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1 AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# g++ stays in the final image: the CPU kernel is compiled for the processor it meets, and Triton compiles its launchers.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Dependencies before the project: their layers are made anew only when a lock changes. Every file is checked against its hash.
FROM base AS build
WORKDIR /build
RUN python -m venv /opt/ranker
ENV PATH=/opt/ranker/bin:$PATH
COPY docker/requirements.lock docker/torch-*.lock ./
RUN pip install --require-hashes --no-deps -r requirements.lock

FROM build AS build-cuda
RUN pip install --require-hashes --no-deps -r torch-cuda.lock
COPY pyproject.toml LICENSE ./
COPY app app
COPY model model
COPY weights weights
COPY loadtest/machine.py loadtest/
COPY loadtest/generate loadtest/generate
COPY loadtest/measure loadtest/measure
COPY loadtest/servers loadtest/servers
RUN touch README.md && pip install --no-deps --no-build-isolation . && pip check

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --require-hashes --no-deps --extra-index-url "$TORCH_INDEX" -r torch-cpu.lock
COPY pyproject.toml LICENSE ./
COPY app app
COPY model model
COPY weights weights
COPY loadtest/machine.py loadtest/
COPY loadtest/generate loadtest/generate
COPY loadtest/measure loadtest/measure
COPY loadtest/servers loadtest/servers
RUN touch README.md && pip install --no-deps --no-build-isolation . && pip check

FROM base AS runtime
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="phoenix-ranking-server" \
      org.opencontainers.image.description="Online ranking of feed candidates by a Grok transformer" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
RUN useradd --uid 10001 --user-group --create-home --home-dir /home/ranker --shell /usr/sbin/nologin ranker \
    && install -d -o ranker -g ranker /home/ranker/.cache
ENV PATH=/opt/ranker/bin:$PATH \
    HOME=/home/ranker \
    PYTHONDONTWRITEBYTECODE=1 \
    TRITON_CACHE_DIR=/home/ranker/.cache/triton \
    RANKER_HOST=0.0.0.0 \
    RANKER_PORT=8000 \
    RANKER_CHECKPOINT=/weights/current
WORKDIR /home/ranker
# The only place that is written to, so that the root file system can be read-only: compiled kernels.
VOLUME /home/ranker/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=4s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as http; http.urlopen('http://127.0.0.1:' + os.environ['RANKER_PORT'] + '/readyz', timeout=3)"]
ENTRYPOINT ["python", "-m", "app"]

FROM runtime AS cpu
ENV RANKER_DEVICE=cpu
COPY --from=build-cpu /opt/ranker /opt/ranker
USER 10001:10001

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility RANKER_DEVICE=cuda
COPY --from=build-cuda /opt/ranker /opt/ranker
USER 10001:10001
