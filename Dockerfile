# Shardwise with transformers and tokenizers, for one machine or as the image of `shardwise submit --k8s`.
#
#   docker build -t shardwise .
#   docker build -t shardwise:cpu --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .     without CUDA
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" shardwise train job.toml

FROM python:3.12-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY shardwise shardwise
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.12-slim
# torch.compile needs a C++ compiler, `submit --ssh` an ssh.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ openssh-client \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_EXTRA_INDEX_URL
COPY constraints.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt torch
# In layers of their own: a new version of Shardwise does not load PyTorch again.
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheel/*.whl)[hf,bpe]"
RUN useradd --create-home --uid 1000 shardwise && install --directory --owner shardwise /work
USER shardwise
WORKDIR /work
ENTRYPOINT ["shardwise"]
CMD ["--help"]
