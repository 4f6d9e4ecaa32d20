# Trireme for Kubernetes (cluster/kuberay-*.yaml) and Docker, the same on every machine: versions are constraints.txt's.
#
#   docker build -t registry.example.com/trireme:0.1.0-ray2.60.0-py311-cuda .
#   docker build --build-arg VARIANT=cpu -t trireme:0.1.0-ray2.60.0-py311-cpu .
#
# CUDA's libraries come with torch's wheels: of the node only NVIDIA's driver and container toolkit are needed. Without
# a network, `make wheels` first, where there is one: a folder wheels/ beside this file is all that pip then looks at.
FROM python:3.11.14-slim-bookworm

# cuda or cpu
ARG VARIANT=cuda
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility RAY_AUTH_MODE=token
# The number that Ray's own images and their volumes use. What is installed belongs to root: a run cannot change it.
RUN useradd --uid 1000 --create-home --shell /bin/bash ray
WORKDIR /home/ray/trireme

# What is large first, so that a change of the code does not fetch it again.
RUN --mount=type=bind,target=/source \
    if [ -d /source/wheels ]; then printf '[global]\nno-index = true\nfind-links = /source/wheels\n'; \
    elif [ "$VARIANT" = cpu ]; then printf '[global]\nextra-index-url = https://download.pytorch.org/whl/cpu\n'; \
    fi > /etc/pip.conf \
    && pip install --constraint /source/constraints.txt torch "ray[default,train,tune]" mlflow
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY app app
COPY cluster cluster
COPY strategies strategies
COPY experiments experiments
RUN --mount=type=bind,target=/source \
    pip install --constraint constraints.txt ".[examples,s3]" && rm -rf build /etc/pip.conf && chown ray:ray .

USER 1000
CMD ["trireme", "--help"]
