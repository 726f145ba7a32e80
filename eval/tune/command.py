"""The verb `tune`: search pruning layers and keep ratios on one half of the examples; report on the other half.

lazyllm-bench tune model=tiny dataset=embedded target_speedup=2.3      the best score at an ideal TTFT speedup
lazyllm-bench tune model=tiny dataset=embedded                         the whole front of score against speedup
lazyllm-bench tune -m worker=1,2,3,4 hydra/launcher=joblib ...         four processes on one study
lazyllm-bench tune --help                                              every setting

The same command resumes a study that was stopped or killed. The result is in the study's folder (front.md); a run uses
it by method.schedule=tuned/FOLDER.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from eval.run.job import job, start
from eval.tune.settings import TuneConfig, check_installed, to_tune_config


def tune_job(config: DictConfig) -> None:
    """One process's part in the search of a composed config."""
    with job():
        settings = to_tune_config(config)
        from eval.tune.search import tune  # not at the top: imports torch, only after the arguments are checked

        tune(settings)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises UserError."""
    if not {"-h", "--help"} & set(arguments):
        check_installed()
    start(tune_job, arguments, TuneConfig)
    return 0
