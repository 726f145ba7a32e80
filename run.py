"""The main job: one model, one method, some datasets, by one command.

python run.py                                                    the embedded default, offline
python run.py model=llama2 method=lazy dataset=hotpotqa          a checkpoint on LongBench
python run.py -m experiment=table1 model=llama2,xgen             a job for each model and method
python run.py --help                                             every setting
"""

from __future__ import annotations

import logging
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from eval.config import register_schema, to_run_config
from eval.run import USER_ERRORS, compare, run

register_schema()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr, force=True
    )
    for chatty in ("absl", "httpx", "datasets"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        settings = to_run_config(config)
        compare(settings) if settings.compare else run(settings)
    except USER_ERRORS as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # the sweep's other jobs go on; Hydra ends it with the first error
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("stopped: every finished example is safe, and the same command goes on from there", file=sys.stderr)
        sys.exit(130)  # as a shell reports a program that Ctrl-C ended


if __name__ == "__main__":
    main()
