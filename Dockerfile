# Surogate with compiled kernels: docker build -t surogate .   (one architecture: --build-arg CUDAARCHS=90-real)
#   docker run --gpus all -v "$PWD:/runs" -v ~/.cache:/root/.cache surogate sft run.yaml

FROM python:3.12-slim AS build
ARG CUDAARCHS
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make
COPY . /source
RUN SUROGATE_CUDA=on make -C /source wheels

FROM python:3.12-slim
COPY --from=build /source/dist /wheels
COPY constraints/cpu.txt /wheels/constraints.txt
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt --find-links /wheels 'surogate[dora,tensorboard,wandb]'
WORKDIR /runs
ENTRYPOINT ["surogate"]
