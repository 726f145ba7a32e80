# docker build -t lazyllm-bench .
# docker run --rm --gpus all -v "$PWD/runs:/bench/runs" -v "$HOME/.cache:/root/.cache" \
#     lazyllm-bench run model=llama2 method=lazy dataset=hotpotqa limit=5
# The versions are those of requirements.lock. torch's wheel brings its own CUDA 13 libraries; the host needs a driver for
# them (580 or later), which this image asks for, and NVIDIA's container toolkit.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /bench
COPY . .
RUN make setup
ENV PATH=/bench/.venv/bin:$PATH
ENTRYPOINT ["lazyllm-bench"]
CMD ["--help"]
