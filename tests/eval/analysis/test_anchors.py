from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from eval.analysis.anchors import anchors
from eval.analysis.paper_tables import PUBLISHED
from eval.benchmarks.datasets import DATASETS, SUITES
from eval.store.results import Results
from lazyllm.presets import PRESETS
from tests.eval.analysis.made import over, stored


def run_of(model: str, names: tuple[str, ...], planned: int = 2, **config: Any) -> Any:
    """Two examples of each dataset with a score of 0.5, of as many as planned."""
    run = stored(over(names, score=0.5), "baseline", model=model)
    about = {**run.about, "examples": dict.fromkeys(names, planned)}
    return replace(run, about=about | {"config": {**run.about["config"], **config}})


def test_whole_parts_stand_beside_what_is_published() -> None:
    code = ("lcc", "repobench-p")
    table = anchors(Results([run_of("llama2", (*code, "hotpotqa"))]))
    shown = table.frame.set_index("part")
    assert shown["published"].to_dict() == {"hotpotqa": 25.4, "lcc": 52.4, "repobench-p": 43.8}  # of LongBench's README
    assert shown["score"].tolist() == [50, 50, 50]
    assert shown.loc["lcc", "ratio"] == pytest.approx(50 / 52.4)
    assert shown["allowed"].to_dict() == {
        "hotpotqa": "0.9 to 1.1 !", "lcc": "0.9 to 1.1", "repobench-p": "0.9 to 1.1 !"
    }  # fmt: skip
    # a task of all its datasets, by the hub's name
    table = anchors(Results([run_of("Llama-3.2-1B-Instruct", ("lcc_e", "repobench-p_e"))]))
    assert table.frame.set_index("part")["published"].to_dict() == {
        "code": 31.89, "lcc_e": 34.01, "repobench-p_e": 29.78
    }  # fmt: skip
    assert anchors(Results([run_of("llama2", code, planned=200)])).frame.empty  # a part of the examples
    assert anchors(Results([run_of("tiny", code)])).frame.empty
    random = run_of("llama2", code)
    random.identity["load_format"] = "dummy"
    assert anchors(Results([random])).frame.empty
    assert anchors(Results([stored(over(code), "baseline", model="llama2")])).frame.empty  # sizes are unknown


def test_published_scores_name_parts_that_exist_and_their_source() -> None:
    rows: Any = pd.read_csv(PUBLISHED / "anchors.csv", keep_default_na=False)
    for row in rows.to_dict("records"):
        preset, *others = row["models"].split()
        assert PRESETS[preset].source.rpartition("/")[2] in others
        parts = {name for data in SUITES[row["suite"]].datasets for name in (data.name, data.task)}
        assert row["part"] in parts | {"all"}
        assert row["source"].startswith("https://github.com/")
    assert not rows.duplicated(["models", "suite", "length", "part"]).any()
    # the mean that LongBench prints is over its tasks
    for models, part in rows[rows["suite"] == "longbench"].groupby("models"):
        scores = part.set_index("part")["published"]
        tasks = pd.Series({name: DATASETS[name].task for name in scores.index.drop("all")})
        mean = scores.drop("all").groupby(tasks).mean().mean()
        assert mean == pytest.approx(scores["all"], abs=0.15), models
