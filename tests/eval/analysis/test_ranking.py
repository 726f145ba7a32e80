from typing import Any

import pytest

from eval.analysis.ranking import ranking
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.made import line, stored
from tests.eval.store.visits import visit

TWICE = {"prefill_flops": 200}  # of the baseline: an ideal speedup of 2

pytestmark = pytest.mark.usefixtures("two_have_an_interval")


def swept(
    method: str, speedup: float, kls: list[float], scores: list[Any], **settings: Any
) -> StoredRun:
    """A run of a setting given by a speedup, from the KL and score of its answers."""
    pairs = enumerate(zip(kls, scores, strict=True))
    baseline = {"prefill_flops": round(100 * speedup)}
    visits = [visit(row, "hops", baseline, kl=kl, score=score) for row, (kl, score) in pairs]
    return stored(visits, method, {"speedup": speedup} | settings)


def test_methods_are_ranked_on_the_examples_that_all_have() -> None:
    runs = [
        swept("lazy", 1.5, [0.1, 0.3, 0.2], [1, 1, 0.5]),
        swept("static_pruning", 1.5, [0.2, 0.4, 0.3], [1, 0, 0.5], layer=2),
        swept("random_drop", 1.5, [0.9, 0.1], [0, 1]),
        swept("lazy", 2.0, [0.5, 0.7], [1, 1]),
        stored([visit(0, "hops", kl=0.0)]),  # its speedup is not given
    ]
    table = ranking(Results(runs))
    columns = [
        "target",
        "rank",
        "method",
        "examples",
        "kl",
        "kl_difference",
        "score",
        "score_difference",
    ]
    assert table.frame[columns].to_numpy().tolist() == [
        [1.5, 1, "lazy", 2, pytest.approx(0.2), 0, 100, 0],
        [1.5, 2, "static_pruning", 2, pytest.approx(0.3), pytest.approx(0.1), 50, -50],
        [1.5, 3, "random_drop", 2, pytest.approx(0.5), pytest.approx(0.3), 50, -50],
        [2.0, 1, "lazy", 2, pytest.approx(0.6), 0, 100, 0],
    ]
    static, drop = (line(table.frame, target=1.5, rank=rank) for rank in (2, 3))
    assert (static["kl_low"], static["kl_high"]) == (pytest.approx(0.2), pytest.approx(0.4))
    # paired: always 0.1 worse, whatever is drawn
    assert table.cells["KL - rank 1's"].tolist()[:2] == ["-", "+0.10000 (+0.10000, +0.10000)"]
    assert line(table.cells, rank="2")["method"] == "static_pruning, layer=2"
    assert (drop["kl_difference_low"], drop["kl_difference_high"]) == (
        pytest.approx(-0.2),
        pytest.approx(0.8),
    )


@pytest.mark.parametrize(
    ("lacks", "first", "ranked_by"),
    [((), "lazy", "answer_kl"), (("answer_kl",), "static_pruning", "gold_kl"),
     (("answer_kl", "gold_kl"), "lazy", "kl")],
)  # fmt: skip
def test_the_answers_kl_ranks_where_all_have_it(
    lacks: tuple[str, ...], first: str, ranked_by: str
) -> None:
    """A method may hit the first token's distribution and lose the answer after it; scores of few
    are noise."""
    lazy = {"answer_kl": 0.1, "gold_kl": 0.4, "kl": 0.2, "score": 0.1}
    # one that lacks it is enough
    lazy = {name: value for name, value in lazy.items() if name not in lacks}
    static = {"answer_kl": 0.3, "gold_kl": 0.2, "kl": 0.4, "score": 0.9}
    runs = [
        stored([visit(row, "hops", TWICE, **values) for row in (0, 1)], name, {"speedup": 2.0})
        for name, values in (("lazy", lazy), ("static_pruning", static))
    ]
    frame = ranking(Results(runs)).frame
    assert (frame["method"].iloc[0], set(frame["ranked_by"])) == (first, {ranked_by})
    assert frame[f"{ranked_by}_difference"].tolist()[1] > 0


def test_missed_speedups_are_not_ranked() -> None:
    def run(method: str, kls: list[float], ideal: float, **about: Any) -> StoredRun:
        baseline = {"prefill_flops": round(100 * ideal)}
        return stored(
            [visit(row, "hops", baseline, kl=kl) for row, kl in enumerate(kls)],
            method,
            {"speedup": 2.0},
            **about,
        )

    runs = [
        run("fastkv", [0.3, 0.5], 1.85),
        run("random_drop", [0.9], 2.2),
        run("promptdistill", [0.0], 1.0),  # short prompts: nothing was saved, and nothing lost
        run("claa", [1.9], 2.42),  # it is not at 2x either, and pays for its speed
        stored([visit(0, "hops", kl=0.0)], "asl", {"keep": 0.3}),
        stored([visit(0, "hops", kl=0.2)], "uniprefill", {"p": 0.99}),
    ]
    table = ranking(Results(runs))
    assert table.frame[["rank", "method", "examples"]].to_numpy().tolist() == [
        [1, "fastkv", 1],
        [2, "random_drop", 1],
    ]
    assert table.notes.endswith(
        " Not ranked: promptdistill, speedup=2x, whose prefills had an ideal speedup of 1.00; "
        "claa, speedup=2x, whose prefills had an ideal speedup of 2.42; ASL and UniPrefill, whose "
        "speed is measured, not set."
    )
    assert "Not ranked" not in ranking(Results(runs[:2])).notes


def test_bytes_stand_beside_the_quality_of_equal_speeds() -> None:
    """KV and Aux Cache over the baseline's of the same visit: 1000 bytes, once 2000."""
    stores = {"lazy": (850, 60), "fastkv": (110, 0)}
    runs = [
        stored(
            [
                visit(row, "hops", {"kv_bytes": size, "aux_bytes": 0} | TWICE, kl=0.2,
                      kv_bytes=kv * size // 1000, aux_bytes=aux * size // 1000)
                for row, size in enumerate((1000, 2000))
            ],
            method,
            {"speedup": 2.0},
        )
        for method, (kv, aux) in stores.items()
    ]  # fmt: skip
    table = ranking(Results(runs))
    frame = table.frame.set_index("method")["stored"]
    assert frame.to_dict() == {"lazy": pytest.approx(91), "fastkv": pytest.approx(11)}
    assert sorted(table.cells["stored, % of baseline's"]) == ["11.0", "91.0"]
    alone = [stored([visit(0, "hops", None, kl=0.2)], settings={"speedup": 2.0}, baseline=None)]
    assert "stored, % of baseline's" not in ranking(Results(alone)).cells
