# tanager in a container, for CPU or for NVIDIA GPUs.
#
#     docker build --tag tanager .
#     docker build --tag tanager-cuda --build-arg EXTRA=cuda .
#     mkdir -p runs   # else Docker makes it, and only root can write there
#     docker run --rm -v "$PWD/runs:/work/runs" tanager train digits --out runs/digits
#     docker run --rm --gpus all -v "$PWD/runs:/work/runs" tanager-cuda train --out runs/demo
#
# EXTRA takes the names in pyproject.toml, with commas between them: cuda,search,hub.
# The wheels of JAX bring CUDA: the host needs only the driver and the container toolkit.

FROM python:3.12-slim-bookworm AS build
ARG EXTRA=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m venv /opt/tanager \
    && /opt/tanager/bin/pip install ".${EXTRA:+[$EXTRA]}"

FROM python:3.12-slim-bookworm
# Give your own id to own the runs: docker build --build-arg UID="$(id -u)" .
ARG UID=1000
RUN useradd --uid "$UID" --create-home tanager \
    && mkdir -p /work/runs \
    && chown tanager /work/runs
COPY --from=build /opt/tanager /opt/tanager
ENV PATH="/opt/tanager/bin:$PATH"
# Accounts of data must outlive the container, so they go where the runs are mounted.
ENV TANAGER_STATE_DIR=/work/runs/.state
USER $UID
WORKDIR /work
ENTRYPOINT ["tanager"]
CMD ["--help"]
