"""Headline numbers of results/smollm2 from the lines of its records, by code that imports none of
ours.

Slow and obvious, from docs/glossary.md and docs/results.md.
"""

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "results" / "smollm2"
MODEL = "smollm2 (Q4_1)"
TASKS = {
    "single_doc_qa": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi_doc_qa": ("hotpotqa", "2wikimqa", "musique"),
    "summarization": ("gov_report", "qmsum", "multi_news"),
    "few_shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
# {max_new_tokens: the folder of the tables of its runs}
GROUPS = {16: "field_1.5x+figure5+revival", 1: "figure6", 64: "figure7+table1"}
METHODS = {
    "random_drop": "random token drop", "static_pruning": "static pruning", "lazy": "lazyllm",
    "prompt_compression": "prompt compression",
}  # fmt: skip
Row = dict[
    str, Any
]  # an arm's answer to an example, and under "baseline" the baseline's of the same visit
Number = Callable[[list[Row]], float]  # of a setting's rows


def setting_of(arm: Row) -> str:
    """An arm's setting as tables show it: `lazy, speedup=1.5x`; the seed and null are left out."""
    speedup = arm.get("speedup")
    values = (
        {}
        if speedup is None
        else {"speedup": speedup if isinstance(speedup, str) else f"{speedup:g}x"}
    )
    values |= {
        key: value
        for key, value in arm["method"].items()
        if key not in ("name", "seed") and value is not None
    }
    return ", ".join(
        [arm["method"]["name"], *(f"{key}={json.dumps(value)}" for key, value in values.items())]
    ).replace('"', "")


def read() -> dict[tuple[str, str], list[Row]]:
    """{(folder, setting): its answers that count}: of runs of one setting, seed and dataset, those
    of the run with most examples, else of the newest."""
    found = defaultdict[tuple[str, str, str], list[tuple[int, str, list[Row]]]](list)
    for folder in (FOLDER / "records").iterdir():
        run = json.loads((folder / "run.json").read_text())
        identity, rows = run["identity"], defaultdict[tuple[str, str], list[Row]](list)
        for line in gzip.decompress((folder / "visits.jsonl.gz").read_bytes()).splitlines():
            visit = json.loads(line)
            (task,) = (task for task, names in TASKS.items() if visit["dataset"] in names)
            about = {
                "task": task,
                **{
                    key: visit[key]
                    for key in ("dataset", "id", "prompt_tokens", "attention_ceiling")
                },
            }
            answers = {name: about | answer for name, answer in visit["arms"].items()}
            for name, answer in answers.items():
                arm = setting_of(identity["arms"][name])
                rows[arm, visit["dataset"]].append(answer | {"baseline": answers["baseline"]})
        assert identity["model"] == MODEL
        for (arm, dataset), own in rows.items():
            found[GROUPS[identity["max_new_tokens"]], arm, dataset].append(
                (len(own), run["provenance"]["started"], own)
            )
    counting = defaultdict[tuple[str, str], list[Row]](list)
    for (group, arm, _), runs in found.items():
        counting[group, arm] += max(runs, key=lambda one: one[:2])[2]
    return counting


ROWS = read()


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


def of_examples(value: Callable[[Row], float | None]) -> Number:
    """The mean over a dataset's examples; NaN for what was not measured."""

    def known(row: Row) -> float:
        found = value(row)
        return math.nan if found is None else found

    return over_tasks(lambda rows: mean(map(known, rows)))


def ratio(cost: Callable[[Row, Row], float]) -> Number:
    """The baseline's sum over the method's, for each dataset. cost: of an answer, beside the other
    one."""
    return over_tasks(
        lambda rows: (
            sum(cost(row["baseline"], row) for row in rows)
            / sum(cost(row, row["baseline"]) for row in rows)
        )
    )


def part_of(number: Number) -> Number:
    """The method's over the baseline's, on the same examples."""
    return lambda rows: number(rows) / number([row["baseline"] for row in rows])


def seconds(row: Row, other: Row | None = None) -> float:
    """To the last token, of the shorter answer if there is another one."""
    steps = row["decode_step_s"]
    return row["ttft_s"] + sum(steps[: len((other or row)["decode_step_s"])])


def computed(row: Row) -> float:
    """The share of the prompt that was computed by the end, mean over layers, with what scoring
    computed."""
    layers = sum(
        width * tokens
        for width, tokens in zip(row["group_layers"], row["computed"][-1], strict=True)
    )
    return 100 * (layers / sum(row["group_layers"]) + row["scoring_tokens"]) / row["prompt_tokens"]


# a dataset's score is rounded to two digits, as LongBench rounds it
SCORE = over_tasks(lambda rows: round(100 * mean(row["score"] for row in rows), 2))
TTFT_SPEEDUP, GENERATION_SPEEDUP = ratio(lambda row, _: row["ttft_s"]), ratio(seconds)
COMPUTED = of_examples(computed)
SHOWN: dict[str, Number] = {
    "n": len,
    "score": SCORE,
    "% of baseline": lambda rows: 100 * part_of(SCORE)(rows),
    "KL, nats": of_examples(lambda row: row["kl"]),
    "answer's KL": of_examples(lambda row: row["answer_kl"]),
    "gold KL": of_examples(lambda row: row["gold_kl"]),
    "gold log-likelihood": of_examples(lambda row: row["gold_log_likelihood"]),
    "TTFT speedup": TTFT_SPEEDUP,
    "ideal": ratio(lambda row, _: row["prefill_flops"]),
    "generation speedup": GENERATION_SPEEDUP,
    "whole-answer speedup": ratio(lambda row, _: seconds(row)),
    "% computed": COMPUTED,
    "ideal without attention": of_examples(lambda row: row["attention_ceiling"]),
    "KV cache, MB": of_examples(lambda row: row["kv_bytes"] / 1e6),
}


def lines_of(name: str, group: str = "") -> list[dict[str, str]]:
    """A table's rows of the model, {heading: cell}."""
    text = (FOLDER / group / "tables" / f"{name}.md").read_text()
    lines = [
        line for line in text.splitlines() if line.startswith(("| model", "|---", f"| {MODEL}"))
    ]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


def check(cell: str, value: float, about: Any) -> None:
    """A cell's number is the value, to its last digit."""
    if cell in ("-", "?"):
        assert cell == "?" or math.isnan(value), about
        return
    shown = cell.split()[0]
    assert float(shown) == pytest.approx(value, abs=0.51 * 10 ** -len(shown.partition(".")[2])), (
        about
    )


def test_field_has_every_setting_with_its_numbers() -> None:
    titles = {}
    for (group, setting), rows in ROWS.items():
        method, _, rest = setting.partition(", ")
        titles[group, METHODS.get(method, method), rest or "-"] = rows
    lines = {
        (group, line["method"].lower(), line["setting"]): line
        for group in GROUPS.values()
        for line in lines_of("field", group)
    }
    assert lines.keys() == titles.keys()
    for key, line in lines.items():
        for name in line.keys() & SHOWN.keys():
            check(line[name], SHOWN[name](titles[key]), (line, name))


ARMS = {
    "LazyLLM": "lazy, speedup={}", "without revival": "lazy, speedup={}, revive=false",
    "static pruning": "static_pruning, speedup={}, layer=2",
    "random drop": "random_drop, speedup={}",
}  # fmt: skip
KLS = {"the baseline's answer": "answer_kl", "the gold answer": "gold_kl", "the first token": "kl"}


def test_revival_is_a_geometric_mean_of_ratios() -> None:
    lines = lines_of("revival", GROUPS[16])
    assert len(lines) == 2 * len(KLS)
    for line in lines:
        speedup, kl = line["ideal speedup"], KLS[line["KL of"]]
        for heading in [heading for heading in line if " / " in heading]:
            keys = [(GROUPS[16], ARMS[name].format(speedup)) for name in heading.split(" / ")]
            first, second = (
                {(row["dataset"], row["id"]): row for row in ROWS[key]} for key in keys
            )
            logs = [
                row | {"log": math.log(row[kl] / second[key][kl])}
                for key, row in first.items()
                if key in second and min(row[kl], second[key][kl]) > 0
            ]
            check(
                line[heading], math.exp(of_examples(lambda row: row["log"])(logs)), (line, heading)
            )


def below_even_share() -> float:
    """Of each traced prompt, the share of its tokens whose mean importance over the layers is below
    1/n."""
    prompts = {}
    for file in (FOLDER / "records").rglob("traces/*.json.gz"):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        scores = [mean(layers) for layers in zip(*trace["importance"], strict=True)]
        prompts[trace["dataset"], trace["id"]] = 100 * mean(
            score < 1 / len(scores) for score in scores
        )
    assert len(prompts) >= 5
    return mean(prompts.values())


def test_claims() -> None:
    table1 = {setting: rows for (group, setting), rows in ROWS.items() if group == GROUPS[64]}
    lazy, compression = (
        table1["lazy, speedup=table1"],
        next(table1[one] for one in table1 if "compression" in one),
    )
    step = of_examples(lambda row: row["ttft_s"] / mean(row["decode_step_s"]))
    expected = {
        "TTFT, in decoding steps of the baseline": step(
            [row for row in table1["baseline"] if row["decode_step_s"]]
        ),
        "Most prompt tokens get less than an even share of the last token's attention, %": (
            below_even_share()
        ),
        "TTFT speedup (mean over tasks)": TTFT_SPEEDUP(lazy),
        "Prompt compression's TTFT speedup (fastest task)": max(
            map(TTFT_SPEEDUP, group_by(compression, "task"))
        ),
        "Prompt tokens computed by the end, % (mean over tasks)": COMPUTED(lazy),
        "Generation speedup (mean over tasks)": GENERATION_SPEEDUP(lazy),
        "First layers compute more of the prompt than the last, points": mean(
            100 * (row["computed"][-1][0] - row["computed"][-1][-1]) / row["prompt_tokens"]
            for row in lazy
        ),
    }
    ours = {line["claim"]: line["ours"] for line in lines_of("verdicts")}
    for name, value in expected.items():
        check(ours[name], value, name)


def test_a_wrong_number_is_seen() -> None:
    check("1.23 ±0.10", 1.234, "")
    check("-", math.nan, "")
    for cell, value in (("1.23 ±0.10", 1.24), ("-", 1.0), ("12", 13.0)):
        with pytest.raises(AssertionError):
            check(cell, value, "")
