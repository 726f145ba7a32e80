#!/usr/bin/env bash
# The first hour on a GPU: scripts/first_gpu_hour.sh OUT [part ...]
#
# Parts of at most nine minutes each, one file of each in OUT; at half of the data sheets' rates, all take about 45 minutes
# on an A100, 25 on an H100. A part whose file is in OUT is left out, and the bench goes on after the last case of one that
# was killed, so the same command resumes. It only measures: whether all is right there, `pytest tests/test_cuda.py` shows.
# Needs 24 GB of GPU memory, bfloat16, Python >= 3.11 with torch, transformers, numpy, filelock and safetensors; no network
# and no checkpoint, as weights are random: times depend on shapes, not on values. SHAPES=tiny tries it on a CPU.
set -euo pipefail
out=$(mkdir -p "${1:?give a folder for the results}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m scripts.gpu_hour "$out" "${@:2}"
