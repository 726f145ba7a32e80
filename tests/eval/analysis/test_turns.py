from typing import Any

import numpy as np
import pytest

from eval.analysis.turns import by_turn, data, plot, turns
from eval.store.results import Results
from eval.store.runs import StoredRun
from eval.store.visit import Visit
from tests.eval.analysis.made import conversation, drawn, stored, texts

pytestmark = pytest.mark.usefixtures("two_have_an_interval")

KEEP = {"layer": 2, "keep": "1.5x"}


def row(dataset: str, name: str, *measured: tuple[float, float, float, float], first: int = 100) -> Visit:
    """A row from the scores, TTFT and whole times of its turns, and the baseline's whole times; its TTFT is 1 s.

    first: tokens of the whole prompt; later messages have 20.
    """
    own, baseline, so_far, baseline_so_far = [], [], 0.0, 0.0
    for number, (score, ttft, total, theirs) in enumerate(measured):
        so_far, baseline_so_far = so_far + total, baseline_so_far + theirs
        baseline.append({"ttft_s": 1.0, "total_s": theirs, "total_s_so_far": baseline_so_far, "score": 0.25})
        own.append({
            "score": score, "ttft_s": ttft, "total_s": total, "total_s_so_far": so_far, "kl": 0.5,
            "tokens_computed": 7.0, "revived_tokens": number * 1.0,
        })  # fmt: skip
    return conversation(dataset, name, [first, *[20] * (len(own) - 1)], own, baseline)


def runs() -> list[StoredRun]:
    """Two rows of one task and one of another; the method pays off for one question only."""
    visits = [
        row("hotpotqa", "a", (1.0, 0.5, 1.0, 2.0), (0.5, 2.0, 4.0, 1.0)),
        row("hotpotqa", "b", (0.5, 0.5, 1.0, 2.0), (0.0, 2.0, 4.0, 1.0)),
        row("trec", "a", (1.0, 0.25, 2.0, 4.0), (1.0, 4.0, 4.0, 2.0)),
    ]
    once = row("trec", "a", (1.0, 0.5, 1.0, 2.0))
    return [
        stored(visits, "static_pruning", KEEP),
        stored(visits, "static_pruning", {**KEEP, "turns": "recompute"}),
        stored([once], "lazy"),
    ]


def test_turns_by_hand() -> None:
    table: Any = by_turn(Results(runs()))
    assert set(table["turns"]) == {"continue", "recompute"}  # and nothing of what was asked once
    of_method = (table["turns"] == "continue") & (table["method"] == "static_pruning")
    found = table[(table["level"] == "all") & of_method].set_index("turn")
    assert found["score"].tolist() == [(75 + 100) / 2, (25 + 100) / 2]
    assert found["ttft_speedup"].tolist() == [(2 / 1 + 1 / 0.25) / 2, (2 / 4 + 1 / 4) / 2]
    assert found["speedup_so_far"].tolist() == pytest.approx([(4 / 2 + 4 / 2) / 2, (6 / 10 + 6 / 6) / 2])
    assert (found["revived_tokens"].tolist(), found["kl"].tolist()) == ([0, 1], [0.5, 0.5])
    assert found["examples"].tolist() == [3, 3]
    baseline = table[(table["level"] == "all") & (table["method"] == "baseline")]
    assert baseline[["turn", "score", "ttft_speedup", "speedup_so_far"]].to_numpy().tolist() == [
        [1, 25, 1, 1],
        [2, 25, 1, 1],
    ]
    rows = table[(table["level"] == "dataset") & (table["name"] == "hotpotqa") & (table["turn"] == 2)]
    rows = rows[rows["method"] == "static_pruning"]
    drawn = 100 * np.array([0.5, 0.0])  # all that two rows can be drawn to
    assert rows["score_low"].tolist() == [drawn.min()] * 2
    assert rows["score_high"].tolist() == [drawn.max()] * 2


def test_turns_table_has_runs_with_several_questions() -> None:
    cells = turns(Results(runs())).cells
    assert set(cells[cells["method"] == "baseline"]["KL, nats"]) == {"-"}  # it was run, and has no KL from itself
    cells = cells[cells["method"].str.startswith("static")]
    assert cells[["turn", "n", "score", "speedup so far", "revived"]].to_numpy().tolist()[:2] == [
        ["1", "3", "87.50", "2.00", "0.0"], ["2", "3", "62.50", "0.80", "1.0"]
    ]  # fmt: skip
    assert turns(Results(runs()[2:])).cells.empty


def test_turns_figure_has_a_column_for_continuing_and_for_starting_again() -> None:
    picture = drawn(plot, data(Results(runs())))
    scores = picture.axes[:2]
    for axes in scores:
        [bars] = axes.containers
        assert bars.lines[0].get_xydata().tolist() == [[1, 87.5], [2, 62.5]]
    so_far = picture.axes[6]
    assert so_far.containers[0].lines[0].get_xydata().tolist() == [[1, 2], [2, pytest.approx(0.8)]]
    assert "baseline" in texts(picture)
    assert len(drawn(plot, data(Results(runs()[:1]))).axes) == len(picture.axes) / 2  # no empty column
    assert data(Results(runs()[2:])).empty
