"""Run one model with one method or several on some datasets, as `lazyllm-bench run` does.

python run.py                                              all of the embedded suite, offline
python run.py model=llama2 method=lazy dataset=hotpotqa    a checkpoint on LongBench
python run.py -m experiment=table1 model=llama2,xgen       a job for each model and method
python run.py -m ... hydra/launcher=submitit_slurm         the same on a cluster
python run.py --help                                       every setting
"""

import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if find_spec("hydra") is None:
        print(
            f"error: {sys.executable} lacks the packages that are needed: run  make setup  once, "
            "then  source .venv/bin/activate  in every new shell",
            file=sys.stderr,
        )
        sys.exit(2)
    from eval.cli import main

    sys.exit(main(["run", *sys.argv[1:]]))
