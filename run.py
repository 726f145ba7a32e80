"""The main job: one model, one method, some datasets, by one command.

python run.py                                                    the embedded default, offline
python run.py model=llama2 method=lazy dataset=hotpotqa          a checkpoint on LongBench
python run.py -m experiment=table1 model=llama2,xgen             a job for each model and method
python run.py -m ... hydra/launcher=submitit_slurm               the same on a cluster (eval/conf/hydra/launcher)
python run.py --help                                             every setting
"""

from __future__ import annotations

import os
import sys

import hydra
from omegaconf import DictConfig

from eval.run import interrupt
from eval.run.config import check_choice, check_launcher, register_schema, to_run_config
from eval.run.job import run_job
from eval.run.loop import compare, run
from lazyllm.errors import UserError

register_schema()


@hydra.main(version_base="1.3", config_path="eval/conf", config_name="config")
def main(config: DictConfig) -> None:
    def work() -> None:
        settings = to_run_config(config)
        compare(settings) if settings.compare else run(settings)

    run_job(work)


if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))  # what jobs in other processes import from, as this one does
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        check_launcher(sys.argv[1:])
        check_choice(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
    interrupt.end_soon_after_ctrl_c()
    main()
