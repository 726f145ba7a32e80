"""Sentences that say which of two is better, held to the records of results/smollm2.

By code that imports none of ours.
"""

import csv
from collections.abc import Callable, Iterable, Sequence

import pytest

from tests.conftest import ROOT
from tests.test_smollm2_results import (
    FOLDER,
    SHOWN,
    SPEEDUPS,
    TASKS,
    Row,
    arms,
    average_examples,
    group_by,
    lines_of,
    pair,
    ratio,
    read,
)

KEPT = "lazy_without_revival"
RELEASED = ("released prompt_compression", "table1 prompt_compression")


def leads(
    other: str, speedups: Sequence[str] = SPEEDUPS, tasks: Iterable[str] = ("",)
) -> list[float]:
    """How much nearer LazyLLM is, in nats of the answer's KL, in each task ("": over all)."""
    found = []
    for speedup in speedups:
        rows = pair(*arms(speedup, "lazy", other))
        lead = average_examples(lambda row: row["other"]["answer_kl"] - row["answer_kl"])
        found += [lead([row for row in rows if task in ("", row["task"])]) for task in tasks]
    return found


def stored(row: Row) -> float:
    """What is stored at the end of an answer, over what the baseline stores."""
    whole = row["baseline"]
    return (row["kv_bytes"] + row["aux_bytes"]) / (whole["kv_bytes"] + whole["aux_bytes"])


def favours_static(more: str, fewer: str) -> bool:
    """Static pruning at the lower speed stores more, and is nearer."""
    static = read("figure5", f"static_pruning speedup={fewer}")
    lazy = read("figure5", f"lazy speedup={more}")
    store, kl = average_examples(stored), SHOWN["answer's KL"]
    return store(static) > store(lazy) and kl(static) < kl(lazy)


def revived_costs() -> list[float]:
    lines = lines_of("figure5*/tables/steps")
    return [float(line["revived / prefill"]) for line in lines if line["task"] != "all"]


def needles(*names: str) -> list[float]:
    return [sum(row["score"] for row in read("needle", name)) for name in names]


def recomputed_is_nearer() -> int:
    rows = csv.DictReader((FOLDER / "recomputed.csv").read_text().splitlines())
    names = ("baseline_to_recomputed", "baseline_to_reused")
    return sum(float(row[names[0]]) < float(row[names[1]]) for row in rows)


def score(method: str) -> float:
    """A method's score in single-document QA at 2x."""
    rows = read("figure5", f"{method} speedup=2x")
    return SHOWN["score"]([row for row in rows if row["task"] == "single_doc_qa"])


def kept(experiment: str) -> int:
    """LazyLLM's score in multi-document QA, in % of the baseline's."""
    lazy, baseline = (SHOWN["score"](read(experiment, arm)) for arm in ("lazy", "baseline"))
    return round(100 * lazy / baseline)


def slower() -> list[str]:
    """Tasks whose answers LazyLLM makes slower at Table 1's speeds."""
    tasks = group_by(read("table1", "lazy"), "task")
    return sorted(rows[0]["task"] for rows in tasks if SHOWN["generation speedup"](rows) < 1)


SENTENCES: dict[str, dict[str, Callable[[], bool]]] = {
    "README.md": {
        "LazyLLM (blue) is closer to the baseline than static pruning and random drop": (
            lambda: min(leads("static_pruning") + leads("random_drop")) > 0
        ),
        "on code above 2x it is not closer": lambda: (
            max(leads("static_pruning", SPEEDUPS[3:], ["code"])) < 0
        ),
        "LazyLLM finds 24 at 2x, static pruning 1": (
            lambda: needles("lazy", "static_pruning") == [24, 1]
        ),
    },
    "docs/results.md": {
        "LazyLLM finds 24 of 33, without revival 16": lambda: needles("lazy", KEPT) == [24, 16],
    },
    "docs/questions.md": {
        "at 1.2x it stores a little more than LazyLLM at 2x, at 1.5x a little more": (
            lambda: favours_static("2x", "1.2x") and favours_static("2.5x", "1.5x")
        ),
        "closer to the baseline at 1.5x (0.48) and at 2x (0.79)": (
            lambda: (
                [round(ratio(*arms(at, KEPT, "static_pruning")), 2) for at in SPEEDUPS[1:3]]
                == [0.48, 0.79]
            )
        ),
        "A revived token costs more than a prefilled one": lambda: min(revived_costs()) > 1,
    },
    "docs/paper.md": {
        "LazyLLM's answers to code are slower than the baseline's": lambda: "code" in slower(),
    },
    "results/smollm2/README.md": {
        "this holds against random drop everywhere": (
            lambda: min(leads("random_drop", tasks=TASKS)) > 0
        ),
        "By the mean it is on code from 2.5x on, and in single-document QA at 2.5x": lambda: (
            [lead < 0 for lead in leads("static_pruning", tasks=("code", "single_doc_qa"))]
            == [False] * 6 + [True, True, True, False]
        ),
        "static pruning scores 5.3 points more": lambda: (
            round(score("static_pruning") - score("lazy"), 1) == 5.3
        ),
        "keeps 72 % of the score": lambda: kept("three") == 72,
        "and keeps 50 %": lambda: kept("faster") == 50,
        "answers are slower in summaries and code": lambda: slower() == ["code", "summarization"],
        "nearer to the baseline in 13 of 16 pairs": lambda: recomputed_is_nearer() == 13,
        "about 1.5 times as fast, finds 30": (
            lambda: needles("uniprefill", "asl", "baseline") == [30, 33, 33]
        ),
        "a TTFT speedup of 0.45 as released, 0.61 in one pass": lambda: (
            [round(SHOWN["TTFT speedup"](pair(*both)), 2) for both in (RELEASED, RELEASED[::-1])]
            == [0.45, 0.61]
        ),
    },
}


def check(page: str, words: str, holds: bool) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").replace("**", "")
    assert words in " ".join(text.split()), words
    assert holds, words


@pytest.mark.parametrize("page", SENTENCES)
def test_sentences(page: str) -> None:
    for words, holds in SENTENCES[page].items():
        check(page, words, holds())


def test_a_wrong_sentence_is_seen() -> None:
    for words, holds in (("LazyLLM", False), ("LazyLLM finds 25", True)):
        with pytest.raises(AssertionError):
            check("README.md", words, holds)
