#!/usr/bin/env bash
# The paper's tables and figures from the runs of scripts/sweeps.sh, without a model: scripts/tables.sh [RUNS ...] [--out FOLDER]
set -euo pipefail
exec lazyllm-bench paper "${@:-runs}"
