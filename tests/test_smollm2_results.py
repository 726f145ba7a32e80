"""Headline numbers of results/smollm2 from its records, by code that imports none of ours.

Slow and obvious, from docs/glossary.md: Tables 1 and 2, what revival is worth, and claims.
"""

import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "results" / "smollm2"
TASKS = {
    "single_doc_qa": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi_doc_qa": ("hotpotqa", "2wikimqa", "musique"),
    "summarization": ("gov_report", "qmsum", "multi_news"),
    "few_shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
SPEEDUPS = ("1.2x", "1.5x", "2x", "2.5x", "3x")
TASK_OF = {name: task for task, names in TASKS.items() for name in names}
Row = dict[str, Any]  # an arm's answer, and under "baseline" the baseline's of the same visit
Number = Callable[[list[Row]], float]


@cache
def read(experiment: str, arm: str) -> list[Row]:
    """The answers of an arm in the runs of an experiment, each of other datasets."""
    rows = []
    for file in sorted((FOLDER / "records").glob(f"smollm2-{experiment}*/visits.jsonl.gz")):
        for line in gzip.decompress(file.read_bytes()).splitlines():
            visit = json.loads(line)
            about = {name: visit[name] for name in ("dataset", "id", "prompt_tokens")}
            about |= {"task": TASK_OF.get(about["dataset"], ""), "weight": 1}
            baseline = about | visit["arms"]["baseline"]
            rows.append(about | visit["arms"][arm] | {"baseline": baseline})
    assert len({(row["dataset"], row["id"]) for row in rows}) == len(rows) > 0
    return rows


def group_by(rows: Iterable[Row], name: str) -> list[list[Row]]:
    groups = defaultdict[Any, list[Row]](list)
    for row in rows:
        groups[row[name]].append(row)
    return list(groups.values())


def over_tasks(number: Number) -> Number:
    """The mean over tasks of the mean over the task's datasets."""
    return lambda rows: mean(
        mean(map(number, group_by(task, "dataset"))) for task in group_by(rows, "task")
    )


def total(value: Callable[[Row], float | None], rows: Iterable[Row]) -> float:
    """The weighted sum over rows; NaN if one was not measured."""
    values = ((row["weight"], value(row)) for row in rows)
    return sum(weight * (math.nan if known is None else known) for weight, known in values)


def count(rows: list[Row]) -> float:
    return total(lambda _: 1, rows)


def average_examples(value: Callable[[Row], float | None]) -> Number:
    """The mean over a dataset's examples."""
    return over_tasks(lambda rows: total(value, rows) / count(rows))


def speedup(cost: Callable[[Row, Row], float]) -> Number:
    """The baseline's sum over the method's, whatever the weights. cost: of two answers' first."""
    return over_tasks(
        lambda rows: (
            sum(cost(row["baseline"], row) for row in rows)
            / sum(cost(row, row["baseline"]) for row in rows)
        )
    )


def seconds(row: Row, other: Row) -> float:
    """To the last token of the shorter of two answers."""
    return row["ttft_s"] + sum(row["decode_step_s"][: len(other["decode_step_s"])])


def computed(row: Row) -> float:
    """The share of the prompt computed by the end, mean over layers, with what scoring computed."""
    groups = zip(row["group_layers"], row["computed"][-1], strict=True)
    layers = sum(width * tokens for width, tokens in groups) / sum(row["group_layers"])
    return 100 * (layers + row["scoring_tokens"]) / row["prompt_tokens"]


SHOWN: dict[str, Number] = {
    "n": count,
    # a dataset's score is rounded to two digits, as LongBench rounds it
    "score": over_tasks(
        lambda rows: round(100 * total(lambda row: row["score"], rows) / count(rows), 2)
    ),
    "KL, nats": average_examples(lambda row: row["kl"]),
    "answer's KL": average_examples(lambda row: row["answer_kl"]),
    "gold KL": average_examples(lambda row: row["gold_kl"]),
    "gold log-likelihood": average_examples(lambda row: row["gold_log_likelihood"]),
    "TTFT speedup": speedup(lambda row, _: row["ttft_s"]),
    "generation speedup": speedup(seconds),
    "whole-answer speedup": speedup(lambda row, _: seconds(row, row)),
    "% tokens computed": average_examples(computed),
}


def arms(speedup: str, *names: str) -> list[str]:
    """Arms of Figure 5 at an ideal speedup, as `pair` takes them."""
    return [f"figure5 {name} speedup={speedup}" for name in names]


def pair(first: str, second: str) -> list[Row]:
    """Two arms' answers, each "EXPERIMENT ARM", to the rows that both have."""
    others = {(row["dataset"], row["id"]): row for row in read(*second.split(" ", 1))}
    keys = [(row, (row["dataset"], row["id"])) for row in read(*first.split(" ", 1))]
    return [row | {"other": others[key]} for row, key in keys if key in others]


def ratio(first: str, second: str, kl: str = "answer_kl") -> float:
    """The geometric mean of the first arm's KLs over the second's, where neither is 0."""
    rows = [(row, row[kl], row["other"][kl]) for row in pair(first, second)]
    logs = [row | {"log": math.log(one / other)} for row, one, other in rows if min(one, other) > 0]
    return math.exp(average_examples(lambda row: row["log"])(logs))


def lines_of(name: str) -> list[dict[str, str]]:
    """A table's rows, {heading: cell}. name: what the file's path ends with."""
    (file,) = FOLDER.rglob(f"{name}.md")
    lines = [line.strip("|").split("|") for line in file.read_text().splitlines() if "|" in line]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


def check(cell: str, value: float, about: Any) -> None:
    """A cell's number is the value, to its last digit."""
    if cell == "-":
        assert math.isnan(value), about
        return
    number = cell.split()[0]
    digits = len(number.partition(".")[2])
    assert float(number) == pytest.approx(value, abs=0.51 * 10**-digits), about


def read_seeds() -> list[Row]:
    """Random drop's answers of Table 1: an example counts once, with the mean over its seeds."""
    rows = read("table1", "random_drop seed 0")
    for seed in range(1, 5):
        rows = rows + read("seeds", f"random_drop seed {seed}")
    seeds = Counter((row["dataset"], row["id"]) for row in rows)
    return [row | {"weight": 1 / seeds[row["dataset"], row["id"]]} for row in rows]


@pytest.mark.parametrize(("name", "number"), [("table1", 6 * 5), ("table2", 6)])
def test_tables_1_and_2(name: str, number: int) -> None:
    lines = lines_of(f"tables/{name}")
    assert len(lines) == number
    for line in lines:
        arm = read_seeds() if line["method"] == "random_drop" else read("table1", line["method"])
        rows = [row for row in arm if row["task"] == line["task"]]
        for heading in line.keys() & SHOWN.keys():
            check(line[heading], SHOWN[heading](rows), (line, heading))


MOST = "Most prompt tokens get less than an even share of the last token's attention, %"
LABELS = {
    "LazyLLM": "lazy", "without revival": "lazy_without_revival",
    "static pruning": "static_pruning", "random drop": "random_drop",
}  # fmt: skip
KLS = {"the baseline's answer": "answer_kl", "the gold answer": "gold_kl", "the first token": "kl"}


def test_revival_is_a_geometric_mean_of_ratios() -> None:
    lines = lines_of("figure5*/tables/revival")
    assert len(lines) == 6
    for line in lines:
        kl = KLS[line["KL of"]]
        for heading in [heading for heading in line if " / " in heading]:
            names = [LABELS[name] for name in heading.split(" / ")]
            value = ratio(*arms(line["ideal speedup"], *names), kl=kl)
            check(line[heading], value, (line, heading))


def below_even_share() -> float:
    """The share of a traced prompt's tokens whose mean importance is below 1/n."""
    prompts = {}
    for file in (FOLDER / "records").rglob("traces/*.json.gz"):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        scores = [mean(layers) for layers in zip(*trace["importance"], strict=True)]
        share = mean(score < 1 / len(scores) for score in scores)
        prompts[trace["dataset"], trace["id"]] = 100 * share
    assert len(prompts) >= 5
    return mean(prompts.values())


def test_claims() -> None:
    lazy, compression = read("table1", "lazy"), read("table1", "prompt_compression")
    saved = [
        (row["computed"][-1][0] - row["computed"][-1][-1]) / row["prompt_tokens"] for row in lazy
    ]
    expected = {
        MOST: below_even_share(),
        "No token twice in a layer: largest share of the prompt that a layer ran, %": max(
            100 * max(map(max, row["computed"])) / row["prompt_tokens"] for row in lazy
        ),
        "TTFT speedup (mean over tasks)": SHOWN["TTFT speedup"](lazy),
        "Faster to the first token: TTFT speedup, task by task": min(
            map(SHOWN["TTFT speedup"], group_by(lazy, "task"))
        ),
        "Prompt compression's TTFT speedup (fastest task)": max(
            map(SHOWN["TTFT speedup"], group_by(compression, "task"))
        ),
        "Prompt tokens computed by the end, % (mean over tasks)": SHOWN["% tokens computed"](lazy),
        "Generation speedup (mean over tasks)": SHOWN["generation speedup"](lazy),
        "First layers compute more of the prompt than the last, points": 100 * mean(saved),
    }
    ours = {
        line["claim"]: line["ours"]
        for line in lines_of("tables/verdicts")
        if line["model"].startswith("smollm2")
    }
    for name, value in expected.items():
        check(ours[name], value, name)


def test_a_wrong_number_is_seen() -> None:
    check("1.23 ±0.10", 1.234, "")
    check("-", math.nan, "")
    for cell, value in (("1.23 ±0.10", 1.24), ("-", 1.0), ("12", 13.0)):
        with pytest.raises(AssertionError):
            check(cell, value, "")
