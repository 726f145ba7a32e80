#!/usr/bin/env bash
# The paper's sweeps, over both its models and all of LongBench, into runs/. The same command runs what is missing.
#   scripts/sweeps.sh                                                     one machine, one job after another
#   scripts/sweeps.sh hydra/launcher=ray                                  a machine with several GPUs (extra [ray])
#   scripts/sweeps.sh hydra/launcher=submitit_slurm hydra.launcher.partition=gpu         a cluster (extra [slurm])
#   scripts/sweeps.sh dataset=hotpotqa,qasper,lcc hydra/launcher=ray      a job for each dataset
# COMMAND=plan shows what they cost. SWEEPS="table1 table2" chooses. Then: scripts/tables.sh
set -euo pipefail
for sweep in ${SWEEPS:-table1 table2 figure2 figure5 figure6 figure7}; do
    lazyllm-bench "${COMMAND:-run}" -m "experiment=$sweep" model=llama2,xgen "$@"
done
