# An image with ringtile's wheel, built from this checkout, and no compiler:
#
#     docker build -t ringtile .                                                              CUDA and CPU kernels
#     docker build -t ringtile --build-arg BUILDER=ubuntu:24.04 --build-arg RINGTILE_CUDA=0 .    CPU kernels alone
#     docker run --rm --gpus all --shm-size 8g ringtile                                       what works on this machine
#
# Ranks of one host exchange CPU tensors through shared memory, which docker limits to 64 MB without --shm-size.
ARG BUILDER=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BUILDER} AS builder
ARG RINGTILE_CUDA=1
RUN apt-get update && apt-get install --yes --no-install-recommends g++ gcc make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /ringtile
COPY . .
RUN make wheel RINGTILE_CUDA=${RINGTILE_CUDA}

FROM python:3.12-slim-bookworm
RUN --mount=type=bind,from=builder,source=/ringtile/dist,target=/dist \
    pip install --no-cache-dir "torch>=2.11" \
    && for wheel in /dist/*.whl; do pip install --no-cache-dir "${wheel}[train]"; done \
    && useradd --uid 1000 --create-home ringtile
USER 1000
WORKDIR /home/ringtile
CMD ["python", "-m", "ringtile", "doctor"]
