# Images of glm53srv:
#
#   docker build --target cpu  -t glm53srv:cpu .     the small demo model of this repository, on any machine
#   docker build --target cuda -t glm53srv:cuda .    for an NVIDIA GPU; the model comes from the hub at first start
#
# What is pinned: every Python package, by hash (requirements/*.txt). Base images by tag only: a digest is to be
# taken where a registry can be asked, and given to the build:
#
#   docker buildx imagetools inspect debian:bookworm-slim --format '{{.Manifest.Digest}}'
#   docker build --build-arg CPU_BASE=debian:bookworm-slim@sha256:... --target cpu .
#
# Distribution packages are those of the base image's release; their versions leave the mirrors with each update.
ARG CPU_BASE=debian:bookworm-slim
ARG CUDA_DEVEL_BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG CUDA_BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

# ---- cpu ---------------------------------------------------------------------------------------------------

FROM ${CPU_BASE} AS cpu-build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/glm53srv
COPY requirements/base.txt requirements/
COPY scripts/bootstrap.py scripts/
RUN python3 scripts/bootstrap.py --packages-only
COPY . .
RUN python3 scripts/bootstrap.py \
    && .venv/bin/python -m compileall -q glm53srv

FROM ${CPU_BASE} AS cpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --user-group --create-home --home-dir /cache glm53srv \
    && install -d -o glm53srv -g glm53srv /models
COPY --from=cpu-build /opt/glm53srv /opt/glm53srv
ENV PYTHONUNBUFFERED=1 \
    GLM53_HOST=0.0.0.0 \
    GLM53_MODEL_DIR=/opt/glm53srv/reference/demo/checkpoint
USER 10001:10001
WORKDIR /cache
EXPOSE 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=1m --retries=4 \
    CMD ["/opt/glm53srv/.venv/bin/python", "/opt/glm53srv/docker/healthcheck.py"]
ENTRYPOINT ["/opt/glm53srv/docker/entrypoint.sh"]

# ---- cuda --------------------------------------------------------------------------------------------------

FROM ${CUDA_DEVEL_BASE} AS cuda-build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/glm53srv
COPY requirements/cuda.txt requirements/
COPY scripts/bootstrap.py scripts/build_exllamav3.py scripts/
RUN python3 scripts/bootstrap.py --cuda --packages-only
# The long step, before any code of our own: 8.6 is an RTX 3090; several as "8.6;8.9". MAX_JOBS: empty takes what
# cores and memory allow.
ARG TORCH_CUDA_ARCH_LIST=8.6
ARG MAX_JOBS=
RUN .venv/bin/python scripts/build_exllamav3.py
COPY . .
RUN python3 scripts/bootstrap.py --cuda \
    && .venv/bin/python -m compileall -q glm53srv

FROM ${CUDA_BASE} AS cuda
# Triton compiles the starter of each kernel on its first use: it needs a C compiler and Python.h at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --user-group --create-home --home-dir /cache glm53srv \
    && install -d -o glm53srv -g glm53srv /models
COPY --from=cuda-build /opt/glm53srv /opt/glm53srv
# /cache keeps what Triton and exllamav3 have compiled and timed: a volume there makes the next start faster.
ENV PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    TRITON_CACHE_DIR=/cache/triton \
    GLM53_HOST=0.0.0.0 \
    GLM53_MODEL_DIR=/models \
    GLM53_MODEL_REPO=turboderp/GLM-5.3-Flash-exl3 \
    GLM53_MODEL_REVISION=332ab457b709b7ba30dd9a448be5de03b80a7ac9 \
    SERVED_NAME=glm-5.3-flash
USER 10001:10001
WORKDIR /cache
EXPOSE 30000
STOPSIGNAL SIGTERM
# The start period covers loading 125 GB from a slow disk; a first start that fetches them takes as long as it takes.
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=4 \
    CMD ["/opt/glm53srv/.venv/bin/python", "/opt/glm53srv/docker/healthcheck.py"]
ENTRYPOINT ["/opt/glm53srv/docker/entrypoint.sh"]
