from __future__ import annotations

from eval.analysis.ranking import effective_keep
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.analysis.made import example, line, stored


def with_flops(label: float, scores: dict[str, float], tokens: int = 500, dataset: str = "hops") -> StoredRun:
    visits = [
        example(dataset, name, tokens, {"prefill_flops": 1000}, score=score, prefill_flops=round(1000 * label))
        for name, score in scores.items()
    ]
    return stored(visits, settings={"schedule": {"2": label}})


def test_effective_keep_by_hand() -> None:
    runs = [
        with_flops(0.8, {"a": 1.0, "b": 1.0, "c": 1.0}),
        with_flops(0.5, {"a": 1.0, "b": 0.985, "c": 0.0}),
        with_flops(0.2, {"a": 0.97, "b": 0.0}),
        stored(
            [example("hops", "a", prefill_flops=1500, baseline={"prefill_flops": 1000})],
            "prompt_compression",
            {"keep": 0.5},
        ),
        stored([example("hops", "a")], "baseline"),
    ]
    found = effective_keep(Results(runs)).frame.set_index(["method", "task", "prompt_tokens"])
    lazy = found.loc[("lazy", "multi_doc_qa", "1-512")]
    # of the two examples that all three settings have, the mean score is 99.25 % of the baseline's at 50 % of the FLOPs
    assert (lazy["keep"], lazy["setting"], lazy["examples"], lazy["settings"]) == (50, "lazy, schedule={2: 0.5}", 2, 3)
    assert (lazy["keep_low"], lazy["keep_high"]) == (50, 80)  # "b" twice is 98.5 %
    assert found.loc[("lazy", "all", "all")]["keep"] == 50
    dear = found.loc[("prompt_compression", "all", "all")]
    assert (dear["keep"], dear["setting"]) == (100, "baseline")
    for within, keep in ((0.5, 80), (60, 20)):
        frame = effective_keep(Results(runs), within).frame
        assert set(frame.loc[frame["method"] == "lazy", "keep"]) == {keep}


def test_effective_keep_by_task_and_length() -> None:
    short, long, task = {"a": 1.0, "b": 1.0}, {"c": 0.5, "d": 0.5}, {"e": 0.0, "f": 0.0}
    parts = (with_flops(0.3, short), with_flops(0.6, long, 900), with_flops(0.4, task, 900, "lookup"))
    run = stored([visit for part in parts for visit in part.visits], settings={"schedule": {"2": 0.3}})
    table = effective_keep(Results([run]))
    found = table.frame.set_index(["task", "prompt_tokens"])["keep"].to_dict()
    assert found == {
        ("single_doc_qa", "513-1024"): 100, ("single_doc_qa", "all"): 100, ("multi_doc_qa", "1-512"): 30,
        ("multi_doc_qa", "513-1024"): 100, ("multi_doc_qa", "all"): 100, ("all", "1-512"): 30, ("all", "513-1024"): 100,
        ("all", "all"): 100,
    }  # fmt: skip
    assert line(table.cells, task="single_doc_qa")["1-512 tokens"] == "-"
    silent = stored([example("hops", "a", prefill_flops=1, baseline={"prefill_flops": 2, "score": 0.0})])
    assert effective_keep(Results([silent])).frame["keep"].isna().all()  # any share is near a baseline that scores 0
