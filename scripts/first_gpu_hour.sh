#!/usr/bin/env bash
# The first hour on a GPU: scripts/first_gpu_hour.sh OUT [part ...]
#
# Parts of at most nine minutes each, one file of each in OUT. A part whose file is in OUT is left out, and one that was
# killed goes on after its last case, so the same command resumes. `scripts/first_gpu_hour.sh --plan` prints the minutes
# of each part by card. Needs Python >= 3.11 with torch, transformers, numpy, filelock and safetensors; no network and no
# checkpoint, as weights are random: times depend on shapes, not on values. SHAPES=tiny tries it on a CPU in minutes.
set -euo pipefail
if [ "${1:?give a folder for the results}" = --plan ]; then
    out=--plan
else
    out=$(mkdir -p "$1" && cd "$1" && pwd)
fi
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m scripts.gpu_hour "$out" "${@:2}"
