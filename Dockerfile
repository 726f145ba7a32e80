# docker build -t lazyllm-bench .
# docker run --rm --gpus all -v "$PWD/runs:/bench/runs" -v "$HOME/.cache/huggingface:/root/.cache/huggingface" \
#     lazyllm-bench run model=llama2 method=lazy dataset=hotpotqa limit=5
# The versions are those of requirements.lock. torch's wheel brings its own CUDA libraries; the host needs a driver.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /bench
COPY . .
RUN make setup
ENV PATH=/bench/.venv/bin:$PATH
ENTRYPOINT ["lazyllm-bench"]
CMD ["--help"]
