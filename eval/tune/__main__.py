"""Search pruning layers and keep ratios, on one half of the examples; report on the other one.

python -m eval.tune model=tiny dataset=embedded target_speedup=2.3      the best score at an ideal TTFT speedup
python -m eval.tune model=tiny dataset=embedded                         the whole front of score against speedup
python -m eval.tune -m worker=1,2,3,4 hydra/launcher=joblib ...         four processes on one study
python -m eval.tune --help                                              every setting

The same command goes on with a study that was stopped or killed. What is found is in the study's folder (front.md), and
a run takes it as method.schedule=tuned/FOLDER.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eval.run import interrupt
from eval.run.config import check_launcher
from eval.run.job import run_job
from eval.tune.settings import check_installed, register_tune_schema, to_tune_config
from lazyllm.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

register_tune_schema()


@hydra.main(version_base="1.3", config_path=str(ROOT / "eval" / "conf"), config_name="config")
def main(config: DictConfig) -> None:
    def search() -> None:
        from eval.tune.search import tune  # not at the top: it needs Optuna

        tune(to_tune_config(config))

    run_job(search)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        check_installed()
        check_launcher(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
    interrupt.end_soon_after_ctrl_c()
    main()
