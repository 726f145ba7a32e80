"""The main job: one model, one method, some datasets, by one command.

python run.py                                                    the embedded default, offline
python run.py model=llama2 method=lazy dataset=hotpotqa          a checkpoint on LongBench
python run.py -m experiment=table1 model=llama2,xgen             a job for each model and method
python run.py -m ... hydra/launcher=submitit_slurm               the same on a cluster (conf/hydra/launcher)
python run.py --help                                             every setting
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from eval import interrupt
from eval.config import ConfigError, check_choice, check_launcher, register_schema, to_run_config
from eval.run import USER_ERRORS, compare, run

register_schema()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    job = HydraConfig.get()
    os.chdir(job.runtime.cwd)  # Ray's workers start elsewhere
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr, force=True
    )
    for chatty in ("absl", "httpx", "datasets"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        settings = to_run_config(config)
        compare(settings) if settings.compare else run(settings)
    except Exception as error:
        if job.mode == RunMode.MULTIRUN:  # the sweep's other jobs go on; Hydra ends it with the first error
            logging.error("job failed (%s): %s: %s", " ".join(job.overrides.task), type(error).__name__, error)
            traceback.clear_frames(error.__traceback__)  # Hydra keeps the error, and it would keep the model
            raise
        if isinstance(error, USER_ERRORS):
            sys.exit(f"error: {error}")
        raise
    except KeyboardInterrupt:
        interrupt.end()


if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))  # what jobs in other processes import from, as this one does
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        check_launcher(sys.argv[1:])
        check_choice(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
    interrupt.end_soon_after_ctrl_c()
    main()
