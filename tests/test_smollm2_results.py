"""results/smollm2's tables from its visits, by code that imports none of ours.

Slow and obvious, from docs/glossary.md and docs/results.md. A table's row names its model and its setting; `SHOWN` says
how each column follows from the visits.
"""

import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "results" / "smollm2"
TABLES = sorted((FOLDER / "tables").glob("*.md"))
TASK_OF = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en"), "single_doc_qa"),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), "multi_doc_qa"),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), "summarization"),
    **dict.fromkeys(("trec", "triviaqa", "samsum"), "few_shot"),
    **dict.fromkeys(("passage_count", "passage_retrieval_en"), "synthetic"),
    **dict.fromkeys(("lcc", "repobench-p"), "code"),
}
TASKS = list(dict.fromkeys(TASK_OF.values()))
USUAL = {"prune_generated": False, "revive": True}  # LazyLLM's switches, which labels leave out
Row = dict[str, Any]  # an arm's answer to an example, and under "baseline" the baseline's of the same visit
Number = Callable[[list[Row]], float]  # of a setting's rows
NOTHING = {"-", "?", "unpaired", "not known"}


# The visits


def identity_of(run: dict[str, Any]) -> dict[str, Any]:
    """What runs that share a table agree in: everything but arms, data, seed, warm-up and fidelity."""
    free = {"arms", "data", "seed", "warmup", "fidelity", "baseline", "batch_size", "suite_code"}
    return {key: value for key, value in run["identity"].items() if key not in free}


def setting_of(arm: dict[str, Any]) -> str:
    """An arm's setting as tables show it: `lazy, schedule=1.5x`; seed, null and usual switches are left out.

    ASL and UniPrefill compute as many tokens as the prompt asks for: where a speedup was given, its number is shown.
    """
    method = arm["method"]
    if method["name"] in ("asl", "uniprefill"):
        (number,) = {json.dumps(solved) for solved in arm["parameters"].values()}
        method = method | json.loads(number)

    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {shown(own)}" for key, own in value.items()) + "}"
        return str(value).lower() if isinstance(value, bool) else str(value)

    values = {key: value for key, value in method.items() if key not in ("name", "seed") and value is not None}
    values = {
        key: re.sub(r"^(\d+)\.0x$", r"\1x", value) if isinstance(value, str) else value for key, value in values.items()
    }
    return ", ".join([method["name"], *(f"{k}={shown(v)}" for k, v in values.items() if USUAL.get(k) is not v)])


def read() -> list[Row]:
    """A row for each answer of each arm of each run."""
    rows = []
    for folder in sorted((FOLDER / "records").iterdir()):
        run = json.loads((folder / "run.json").read_text())
        arms = run["identity"]["arms"]
        seen = set()
        for line in gzip.decompress((folder / "visits.jsonl.gz").read_bytes()).splitlines():
            visit = json.loads(line)
            key = visit["dataset"], visit["id"]
            assert key[0] in TASK_OF, (
                "this check knows LongBench: records of another suite belong in a folder of their own"
            )
            assert key not in seen, "this check knows one visit an example"
            seen.add(key)
            plain = {
                name: {
                    "run": folder.name, "identity": identity_of(run), "started": run["provenance"]["started"],
                    "seed": arm["method"].get("seed", run["identity"]["seed"]), "setting": setting_of(arm),
                    "dataset": key[0], "id": key[1], "task": TASK_OF[key[0]], "tokens": visit["turns"][0]["tokens"],
                    **visit["answers"][name][0],
                }
                for name, arm in arms.items()
            }  # fmt: skip
            rows += [row | {"baseline": plain["baseline"]} for row in plain.values()]
    return rows


ROWS = read()


def group_by(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def variants() -> dict[str, dict[str, Any]]:
    """{name of a model in tables: what its runs agree in}. The most common identity has the plain name."""
    kinds = list({json.dumps(row["identity"], sort_keys=True): row["identity"] for row in ROWS}.values())
    runs = list(group_by(ROWS, "run").values())
    usual = {
        key: max(values, key=values.count)
        for key in kinds[0]
        for values in [[rows[0]["identity"][key] for rows in sorted(runs, key=lambda rows: rows[0]["started"])][::-1]]
    }
    found = {}
    for kind in kinds:
        odd = [key for key in kind if kind[key] != usual[key]]
        named = [f"{key}={json.dumps(kind[key])}" for key in odd]
        text = ", ".join(named) if len(odd) <= 2 else f"{named[0]} and {len(odd) - 1} more"
        name = f"{kind['model']} ({text})" if odd else kind["model"]
        assert name not in found
        found[name] = kind
    return found


VARIANTS = variants()


def counting(model: str) -> list[Row]:
    """A model's answers that count: of runs of one setting and seed, that with most examples of the dataset, else the
    newest (docs/results.md)."""
    chosen = []
    own = [row for row in ROWS if row["identity"] == VARIANTS[model]]
    for rows in group_by(own, "setting", "seed", "dataset").values():
        runs = group_by(rows, "run")
        chosen += max(runs.values(), key=lambda rows: (len(rows), rows[0]["started"], rows[0]["run"]))
    return chosen


def rows_of(model: str, setting: str, task: str | None = None) -> list[Row]:
    found = [row for row in counting(model) if row["setting"] == setting and task in (None, row["task"])]
    assert found, (model, setting, task)
    return found


# What tables show of some answers of a setting. Seeds of an example are averaged first: `by_example`


def over_tasks(of_dataset: Number) -> Number:
    """The mean over tasks of the mean over the task's datasets."""

    def whole(rows: list[Row]) -> float:
        return mean(
            mean(of_dataset(own) for own in group_by(of_task, "dataset").values())
            for of_task in group_by(rows, "task").values()
        )

    return whole


def of_examples(value: Callable[[Row], float]) -> Number:
    """The mean over a dataset's examples; of seeds of an example, their mean."""
    return over_tasks(lambda rows: mean(mean(map(value, own)) for own in group_by(rows, "id").values()))


def score(rows: list[Row]) -> float:
    """A dataset's score is rounded to two digits, as LongBench rounds it."""
    return over_tasks(lambda own: round(100 * mean(row["score"] for row in own), 2))(rows)


def ratio(cost: Callable[[Row, Row], float]) -> Number:
    """The baseline's sum over the method's, for each dataset. cost: of an answer, beside the other one."""
    return over_tasks(
        lambda rows: sum(cost(row["baseline"], row) for row in rows) / sum(cost(row, row["baseline"]) for row in rows)
    )


def baselines(rows: list[Row]) -> list[Row]:
    """The baseline's answers beside these."""
    return [row["baseline"] | {"baseline": row["baseline"]} for row in rows]


def part_of(value: Number) -> Number:
    """A ratio of two means: the method's over the baseline's, on the same examples."""
    return lambda rows: value(rows) / value(baselines(rows)) if value(baselines(rows)) else math.nan


def known(number: float | None) -> float:
    """NaN for what was not measured: then the means and ratios over it are NaN too."""
    return math.nan if number is None else number


def time_to(row: Row, tokens: int) -> float:
    """Seconds to the k-th token."""
    return list(accumulate([ttft(row), *(row["times"]["decode_step_s"] or ())]))[tokens - 1]


def to_the_shorter(row: Row, other: Row) -> float:
    return time_to(row, min(len(row["token_ids"]), len(other["token_ids"])))


def fidelity(name: str) -> Number:
    return of_examples(lambda row: known(row["fidelity"] and row["fidelity"][name]))


def caches(row: Row) -> float:
    return row["cost"]["kv_bytes"] + row["cost"]["aux_bytes"]


def scoring_share(rows: list[Row]) -> float:
    share = 100 * of_examples(lambda row: known(row["times"]["scoring_s"]))(rows) / of_examples(ttft)(rows)
    return share or math.nan


def ttft(row: Row) -> float:
    return known(row["times"]["ttft_s"])


PLAIN_SCORE = of_examples(lambda row: 100 * row["score"])  # of differences, which are not rounded
TTFT_SPEEDUP = ratio(lambda row, _: ttft(row))
SHOWN: dict[str, Number] = {
    "score": score,
    "% of baseline": lambda rows: 100 * part_of(score)(rows),
    "score - baseline": lambda rows: score(rows) - score(baselines(rows)),
    "KL, nats": fidelity("kl"),
    "answer's KL": fidelity("answer_kl"),
    "gold KL": fidelity("gold_kl"),
    "gold log-likelihood": fidelity("gold_log_likelihood"),
    "TTFT speedup": TTFT_SPEEDUP,
    "ideal": ratio(lambda row, _: row["cost"]["prefill_flops"]),
    "scoring, %": scoring_share,
    "generation speedup": ratio(to_the_shorter),
    "whole-answer speedup": ratio(lambda row, _: known(row["times"]["total_s"])),
    "% computed": of_examples(lambda row: row["cost"]["pct_prompt_tokens_computed"]),
    "% tokens computed": of_examples(lambda row: row["cost"]["pct_prompt_tokens_computed"]),
    "ideal without attention": of_examples(lambda row: row["cost"]["attention_ceiling"]),
    "KV cache, MB": of_examples(lambda row: row["cost"]["kv_bytes"] / 1e6),
    "Aux Cache, MB": of_examples(lambda row: row["cost"]["aux_bytes"] / 1e6),
    "both, MB": of_examples(lambda row: caches(row) / 1e6),
    "both / baseline": part_of(of_examples(caches)),
    "peak, MB": of_examples(lambda row: row["cost"]["peak_memory_bytes"] / 1e6),
    "peak / baseline": part_of(of_examples(lambda row: row["cost"]["peak_memory_bytes"])),
    "n": lambda rows: len(group_by(rows, "dataset", "id")),
}


# The tables


def lines_of(name: str) -> list[dict[str, str]]:
    """A table's rows, {heading: cell}; none if the table is not there."""
    file = FOLDER / "tables" / f"{name}.md"
    if not file.exists():
        return []
    lines = [line for line in file.read_text().splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


def check(cell: str, value: float, about: Any) -> None:
    """A cell's number is the value, to its last digit, and an interval around it holds it."""
    if cell.strip("()") in NOTHING:
        assert cell == "?" or math.isnan(value), about
        return
    shown = cell.strip("(").split()[0].rstrip("*)")
    assert float(shown) == pytest.approx(value, abs=0.51 * 10 ** -len(shown.partition(".")[2])), about
    if "±" in cell:
        assert float(cell.partition("±")[2].rstrip(")")) >= 0, about
    elif ends := re.search(r"[\[(]([-+.\d]+), ([-+.\d]+)[\])]", cell):
        assert float(ends[1]) <= float(shown) <= float(ends[2]), about


def has_interval(rows: list[Row]) -> bool:
    """At least five examples, and two of each task (docs/glossary.md)."""
    sizes = [len(group_by(own, "dataset", "id")) for own in group_by(rows, "task").values()]
    return sum(sizes) >= 5 and min(sizes) >= 2


def check_columns(line: dict[str, str], rows: list[Row], columns: dict[str, Number] | None = None) -> None:
    """Every column that `SHOWN` (or `columns`) knows; an interval is there only with enough examples."""
    known = SHOWN if columns is None else columns
    for name in [name for name in line if name in known]:
        check(line[name], known[name](rows), (line, name))
        assert "±" not in line[name] or has_interval(rows), (line, name)


def common(rows: list[Row], *settings: str) -> dict[str, list[Row]]:
    """{setting: its rows of the examples that all of these settings have}."""
    of_each = {name: [row for row in rows if row["setting"] == name] for name in settings}
    ids = [{(row["dataset"], row["id"]) for row in own} for own in of_each.values()]
    shared = set.intersection(*ids)
    return {name: [row for row in own if (row["dataset"], row["id"]) in shared] for name, own in of_each.items()}


def target_of(setting: str) -> float | None:
    """The ideal speedup that gives a setting, as in `schedule=1.5x`."""
    found = re.search(r"=([\d.]+)x(?:,|$)", setting)
    return float(found[1]) if found else None


NAMES = {
    "random token drop": "random_drop", "static pruning": "static_pruning", "prompt compression": "prompt_compression",
    "LazyLLM": "lazy", "Baseline": "baseline", "Random Token Drop": "random_drop", "LazyLLM ": "lazy",
    "Static Token Pruning": "static_pruning", "Prompt Compression": "prompt_compression",
}  # fmt: skip
PAPER_TASKS = {
    "Single-Document QA": "single_doc_qa", "Multi-Document QA": "multi_doc_qa", "Summarization": "summarization",
    "Few-shot Learning": "few_shot", "Synthetic": "synthetic", "Code Completion": "code",
}  # fmt: skip
KLS = {"the baseline's answer": "answer_kl", "the gold answer": "gold_kl", "the first token": "kl"}


def test_there_are_tables_of_every_run() -> None:
    assert len(VARIANTS) >= 1
    shown = {line["model"] for line in lines_of("field")}
    assert shown == VARIANTS.keys()


@pytest.mark.parametrize("line", lines_of("field"), ids=lambda line: " ".join(list(line.values())[:3]))
def test_field(line: dict[str, str]) -> None:
    rest = "" if line["setting"] == "-" else f", {line['setting']}"
    settings = {row["setting"] for row in counting(line["model"])}
    method = NAMES.get(line["method"], line["method"].lower())
    found = [one for one in settings if one.partition(", ")[2] == rest[2:] and one.partition(",")[0] == method]
    assert len(found) == 1, line
    rows = rows_of(line["model"], found[0])
    check_columns(line, rows)


AT_THE_END = [line for line in lines_of("memory") if line["decoding steps"] == "end"]
BY_STEP = [line for line in lines_of("memory") if line["decoding steps"] != "end"]
OF_ALL_TASKS = [line for line in lines_of("steps") if line["task"] == "all"]
OF_A_TASK = [line for line in lines_of("steps") if line["task"] != "all"]


def test_memory_at_the_end() -> None:
    assert AT_THE_END
    for line in AT_THE_END:
        check_columns(line, rows_of(line["model"], line["method"]))


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_tables_1_and_2(name: str) -> None:
    for line in lines_of(name):
        settings = {row["setting"] for row in counting(line["model"])}
        preset = {
            one for one in settings if one.split(",")[0] == line["method"] and ("=table1" in one or one == "baseline")
        }
        assert len(preset) == 1, line
        check_columns(line, rows_of(line["model"], preset.pop(), line["task"]))
        assert {line[heading] for heading in line if heading.endswith((", paper", ", Δ"))} == {"-"}  # no such model


@pytest.mark.parametrize("name", ["table1_paper", "table2_paper"])
def test_tables_as_the_paper_prints_them(name: str) -> None:
    shown = {heading.partition(": ")[0] for line in lines_of(name) for heading in line if heading.endswith(": n")}
    (model,) = {line["model"] for line in lines_of("table1")}  # whose name may say more: how this run differs from most
    assert shown == {VARIANTS[model]["model"]}
    for line in lines_of(name):
        method = NAMES[line.get("Method", "LazyLLM")]
        settings = {row["setting"] for row in counting(model) if row["setting"].split(",")[0] == method}
        preset = {one for one in settings if "=table1" in one or one == "baseline"}
        assert len(preset) == 1, line
        (heading,) = shown
        own = {name.removeprefix(f"{heading}: "): cell for name, cell in line.items() if name.startswith(heading)}
        check_columns(own, rows_of(model, preset.pop(), PAPER_TASKS[line["Tasks"]]))
        paper = [cell for heading, cell in line.items() if heading.startswith(("Llama 2", "XGen"))]
        assert all(re.fullmatch(r"- \([\d.]+\)", cell) for cell in paper), line


def in_range(rows: list[Row], name: str, tokens: Callable[[Row], int]) -> list[Row]:
    """The rows whose number of tokens is in a range such as `513-1024`, or `all`."""
    first, last = map(int, name.split("-")) if "-" in name else (0, 10**9)
    return [row for row in rows if first <= tokens(row) <= last]


def test_ttft_share() -> None:
    def share(rows: list[Row]) -> float:
        return 100 * sum(map(ttft, rows)) / sum(row["times"]["total_s"] for row in rows) if rows else math.nan

    assert OF_ALL_TASKS
    for line in OF_ALL_TASKS:
        rows = [row for row in rows_of(line["model"], line["method"]) if row["times"]["total_s"]]
        several = [row for row in rows if row["times"]["decode_step_s"] and row["times"]["ttft_s"]]
        steps = [ttft(row) / mean(row["times"]["decode_step_s"]) for row in several]
        check(line["TTFT, steps"], mean(steps) if steps else math.nan, line)
        check(line["TTFT, % of the time"], share(rows), line)
        assert int(line["n"]) == len(rows)
        for heading in [heading for heading in line if re.match(r"(prompt|answer) \d", heading)]:
            kind, _, name = heading.rpartition(" ")
            tokens = {"prompt": lambda row: row["tokens"], "answer": lambda row: len(row["token_ids"])}[kind]
            check(line[heading], share(in_range(rows, name, tokens)), (line, heading))


def test_ranking() -> None:
    for (model, speedup), lines in group_by(lines_of("ranking"), "model", "ideal speedup").items():
        rows = [row for row in counting(model) if row["fidelity"] and target_of(row["setting"]) == float(speedup[:-1])]
        short = {re.sub(r"\w+=[\d.]+x(, )?", "", row["setting"]).removesuffix(", "): row["setting"] for row in rows}
        of = {line["method"]: short[line["method"]] for line in lines}
        shared = common(rows, *of.values())
        best = None
        for line in lines:
            own = shared[of[line["method"]]]
            check_columns(line, own)
            kl = fidelity({"answer": "answer_kl", "gold": "gold_kl", "first token": "kl"}[line["ranked by"]])(own)
            if best is None:
                assert line["rank"] == "1"
                best = kl, PLAIN_SCORE(own), kl
                continue
            assert kl >= best[2], "the smallest KL is first"
            best = *best[:2], kl
            check(line["KL - rank 1's"], kl - best[0], line)
            check(line["score - rank 1's"], PLAIN_SCORE(own) - best[1], line)


def test_revival() -> None:
    for line in lines_of("revival"):
        target, column = float(line["ideal speedup"][:-1]), KLS[line["KL of"]]
        rows = [row for row in counting(line["model"]) if row["fidelity"] and target_of(row["setting"]) == target]
        named = {}
        for setting in {row["setting"] for row in rows}:
            method = setting.split(",")[0]
            if method == "lazy":
                named["without revival" if "revive=false" in setting else "LazyLLM"] = setting
            elif method in ("static_pruning", "random_drop"):
                named[method.replace("_", " ").replace("random drop", "random drop")] = setting
        for heading in [heading for heading in line if " / " in heading]:
            shared = common(rows, *(named[name] for name in heading.split(" / ")))
            first, second = (shared[named[name]] for name in heading.split(" / "))
            kls = [{(row["dataset"], row["id"]): row["fidelity"][column] for row in own} for own in (first, second)]
            logs = [
                row | {"log": math.log(kls[0][key] / kls[1][key])}
                for row in first
                if min(kls[0][key := (row["dataset"], row["id"])], kls[1][key]) > 0
            ]
            value = math.exp(over_tasks(lambda own: mean(row["log"] for row in own))(logs))
            check(line[heading], value, (line, heading))
            low, high = map(float, re.findall(r"[\d.]+", line[heading])[1:])
            check_ends(logs, low, high, (line, heading))


def check_ends(logs: list[Row], low: float, high: float, about: Any) -> None:
    """The ends of an interval are those of draws made here: of a dataset's n rows n - 1, of a single one's task one row
    (docs/glossary.md). Two bootstraps differ by chance: by a tenth of the width at most."""
    draw, values = np.random.default_rng(1), defaultdict(list)
    for of_task in group_by(logs, "task").values():
        pool = [row["log"] for row in of_task]
        of_datasets = []
        for own in group_by(of_task, "dataset").values():
            of_dataset = pool if len(own) == 1 else [row["log"] for row in own]
            of_datasets.append(draw.choice(of_dataset, (4000, max(1, len(own) - 1))).mean(axis=1))
        values["tasks"].append(np.mean(of_datasets, axis=0))
    ends = np.percentile(np.mean(values["tasks"], axis=0), [2.5, 97.5])
    allowed = 0.1 * (ends[1] - ends[0]) + 0.01
    assert [math.log(low), math.log(high)] == pytest.approx(list(ends), abs=allowed + 0.005 / low), about


def test_methods_at_equal_bytes_are_beside_the_nearest_setting() -> None:
    for line in AT_THE_END:
        settings = {row["setting"] for row in counting(line["model"]) if row["fidelity"]}
        lazy = {one for one in settings if one.startswith("lazy,") and "=false" not in one and "=true" not in one}
        swept = {one for one in lazy if target_of(one)} or lazy
        bytes_of = {one: SHOWN["both / baseline"](rows_of(line["model"], one)) for one in {*swept, line["method"]}}
        nearest = min(swept, key=lambda one: abs(bytes_of[one] - bytes_of[line["method"]]), default=None)
        is_near = nearest is not None and abs(bytes_of[nearest] - bytes_of[line["method"]]) <= 0.05
        if line["method"].startswith(("lazy,", "baseline")) or not is_near:
            assert {line["LazyLLM at these bytes"], line["LazyLLM's lead, nats"]} == {"-"}, line
            continue
        assert f"lazy, {line['LazyLLM at these bytes']}" == nearest, line
        shared = common(counting(line["model"]), nearest, line["method"])
        ours, theirs = shared[nearest], shared[line["method"]]
        name = next(one for one in KLS.values() if not math.isnan(fidelity(one)(ours) + fidelity(one)(theirs)))
        check(line["LazyLLM's lead, nats"], fidelity(name)(theirs) - fidelity(name)(ours), line)
        check(line["its lead, points"], PLAIN_SCORE(ours) - PLAIN_SCORE(theirs), line)
        of_gold = fidelity("gold_log_likelihood")
        check(line["its lead, gold log-likelihood"], of_gold(ours) - of_gold(theirs), line)


def test_aux_cache_by_step() -> None:
    """Held: the prompt's tokens that the last layers have not run; a state is as large as in the answer's end."""
    assert BY_STEP
    for line in BY_STEP:
        rows = [row for row in rows_of(line["model"], line["method"]) if row["cost"]]
        whole = next(row for row in rows if row["cost"]["aux_bytes"])
        state = whole["cost"]["aux_bytes"] / (whole["tokens"] - whole["cost"]["computed"][-1][-1])
        name = line["decoding steps"]
        first, last = (0, 0) if name == "prefill" else (int(name.split("-")[0]), int(name.split("-")[-1]))
        held, bytes_held, kv, revived = [], 0.0, 0.0, []
        answers = 0
        for row in rows:
            computed, baseline = row["cost"]["computed"], row["baseline"]
            token = baseline["cost"]["kv_bytes"] / (baseline["tokens"] + len(baseline["token_ids"]) - 1)
            steps = range(first, min(last, len(computed) - 1) + 1)
            answers += bool(steps)
            for step in steps:
                left = row["tokens"] - computed[step][-1]
                held.append(100 * left / row["tokens"])
                bytes_held += left * state
                kv += token * (row["tokens"] + step)
                if step:
                    pairs = zip(computed[step], computed[step - 1], strict=True)
                    revived.append(max(after - before for after, before in pairs))
        check(line["n"], answers, line)
        check(line["in the Aux Cache, % of the prompt"], mean(held), line)
        check(line["Aux Cache, % of the baseline's KV cache"], 100 * bytes_held / kv, line)
        check(line["revived a step"], mean(revived) if revived else math.nan, line)
        reviving = 100 * sum(one > 0 for one in revived) / len(revived) if revived else math.nan
        check(line["steps that revive, %"], reviving, line)


def one_layer(setting: str) -> tuple[int, float] | None:
    """(layer, keep) of `lazy, schedule={10: 0.3}`."""
    found = re.fullmatch(r"lazy, schedule=\{(\d+): ([\d.]+)\}", setting)
    return (int(found[1]), float(found[2])) if found else None


def test_effective_keep() -> None:
    for line in lines_of("effective_keep"):
        of_method = [row for row in counting(line["model"]) if row["setting"].split(",")[0] == line["method"]]
        of_method = [row for row in of_method if line["task"] in ("all", row["task"])]
        assert len({row["setting"] for row in of_method}) == int(line["settings"]), line
        for heading in [heading for heading in line if heading == "all" or heading.endswith(" tokens")]:
            rows = in_range(of_method, heading.removesuffix(" tokens"), lambda row: row["tokens"])
            check(line[heading], least_share(rows), (line, heading))


def least_share(rows: list[Row]) -> float:
    """The least share of prefill FLOPs, in %, that keeps 99 % of the baseline's score; 100 is the baseline itself."""
    if not rows:
        return math.nan
    shared = common(rows, *{row["setting"] for row in rows})
    baseline = PLAIN_SCORE(baselines(next(iter(shared.values()))))
    if not baseline:
        return math.nan
    flops = of_examples(lambda row: 100 * row["cost"]["prefill_flops"] / row["baseline"]["cost"]["prefill_flops"])
    good = [flops(own) for own in shared.values() if PLAIN_SCORE(own) >= 0.99 * baseline]
    return min([*good, 100])


def test_step_cost() -> None:
    assert OF_A_TASK
    for (model,), lines in group_by(OF_A_TASK, "model").items():
        settings = {row["setting"] for row in counting(model) if row["setting"].startswith("lazy,")}
        setting = "lazy, schedule=table1" if "lazy, schedule=table1" in settings else "lazy, schedule=paper"
        assert {line["method"] for line in lines} == {setting}
        rows = rows_of(model, setting)
        assert {line["task"] for line in lines} == {row["task"] for row in rows}
        for line in lines:
            own = [row for row in rows if row["task"] == line["task"]]
            others = [row for row in rows if row["task"] != line["task"]]
            unit = mean(
                mean(row["baseline"]["times"]["decode_step_s"])
                for row in own
                if row["baseline"]["times"]["decode_step_s"]
            )
            work = [[len(row["token_ids"]) - 1, row["cost"]["revived_tokens"]] for row in others]
            step, token = np.linalg.lstsq(np.array(work), [row["times"]["total_s"] - ttft(row) for row in others])[0]

            def predicted(row: Row, step: float = step, token: float = token) -> float:
                return ttft(row) + step * (len(row["token_ids"]) - 1) + token * row["cost"]["revived_tokens"]

            saved = mean(ttft(row["baseline"]) - ttft(row) for row in own)
            steps = sum(len(row["token_ids"]) - 1 for row in own)
            baseline_ttft = sum(ttft(row["baseline"]) for row in own) / sum(row["tokens"] for row in own)
            totals = [
                sum(row["baseline"]["times"]["total_s"] for row in of_dataset) / sum(map(predicted, of_dataset))
                for of_dataset in group_by(own, "dataset").values()
            ]
            check(line["n"], len(own), line)
            check(line["prefill saves"], saved / unit, line)
            check(line["revived a step"], sum(row["cost"]["revived_tokens"] for row in own) / max(1, steps), line)
            check(line["a step costs"], step / unit, line)
            check(line["a revived token"], token / unit, line)
            check(line["a token in prefill"], baseline_ttft / unit, line)
            check(line["revived / prefill"], token / baseline_ttft, line)
            check(line["speedup, predicted"], mean(totals), line)
            check(line["speedup, measured"], SHOWN["whole-answer speedup"](own), line)


# The claims: each makes the value, or the values of tasks or steps, of a model's rows


def baseline_share(unit: Callable[[Row], float]) -> Callable[[str], list[float]]:
    def values(model: str) -> list[float]:
        rows = [row for row in rows_of(model, "baseline") if row["times"]["decode_step_s"]]
        return [of_examples(lambda row: ttft(row) / unit(row))(rows)]

    return values


def plain_mean(value: Callable[[Row], float], setting: str) -> Callable[[str], list[float]]:
    return lambda model: [mean(map(value, rows_of(model, setting)))]


def by_task(value: Number, setting: str = "lazy, schedule=table1") -> Callable[[str], list[float]]:
    return lambda model: [value(own) for own in group_by(rows_of(model, setting), "task").values()]


def over_all(value: Number, setting: str = "lazy, schedule=table1") -> Callable[[str], list[float]]:
    return lambda model: [value(rows_of(model, setting))]


def lead(column: str, other: str) -> Callable[[str], list[float]]:
    """In each task, how much better LazyLLM is than the other method: the mean over the speedups of both."""
    value, sign = (PLAIN_SCORE, 1) if column == "score" else (fidelity(column), -1)

    def values(model: str) -> list[float]:
        rows = [row for row in counting(model) if "=false" not in row["setting"] and target_of(row["setting"])]
        leads = []
        for of_task in group_by(rows, "task").values():
            of_targets = []
            for target in sorted({target_of(row["setting"]) for row in of_task}):
                pair = {row["setting"] for row in of_task if target_of(row["setting"]) == target}
                ours, theirs = ([one for one in pair if one.split(",")[0] == name] for name in ("lazy", other))
                if ours and theirs:
                    shared = common(of_task, *ours, *theirs)
                    of_targets.append(sign * (value(shared[ours[0]]) - value(shared[theirs[0]])))
            leads += [mean(of_targets)] if of_targets else []
        return leads

    return values


def gains(column: str, axis: int) -> Callable[[str], list[float]]:
    """How much better each next layer (axis 0) or share (axis 1) is, at each value of the other."""
    value, sign = (PLAIN_SCORE, 1) if column == "score" else (fidelity(column), -1)

    def values(model: str) -> list[float]:
        points = {one_layer(row["setting"]): row["setting"] for row in counting(model)}
        points.pop(None, None)
        shared = common(counting(model), *points.values())
        found = {point: value(shared[setting]) for point, setting in points.items()}
        steps = []
        for line in {point[1 - axis] for point in found}:
            along = sorted(point for point in found if point[1 - axis] == line)
            steps += [sign * (found[after] - found[before]) for before, after in pairwise(along)]
        return [step for step in steps if not math.isnan(step)]

    return values


def kept_at(speedup: float) -> Callable[[str], list[float]]:
    """The best share of the baseline's score in multi-document QA of settings of at least this measured speedup."""

    def values(model: str) -> list[float]:
        settings = {row["setting"] for row in counting(model) if row["setting"].startswith("lazy,")}
        settings = {one for one in settings if target_of(one) and "=false" not in one}
        found = [rows_of(model, one, "multi_doc_qa") for one in settings]
        fast = [SHOWN["% of baseline"](own) for own in found if TTFT_SPEEDUP(own) > 0.99 * speedup]
        return [max(fast)] if fast else []

    return values


def below_even_share(model: str) -> list[float]:
    """Of each traced prompt, the share of its tokens whose mean importance over the layers is below 1/n."""
    del model  # traces are of all variants
    prompts = {}
    for file in (FOLDER / "records").rglob("traces/*.json.gz"):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        scores = np.array(trace["importance"]).mean(axis=0)
        prompts[trace["dataset"], trace["id"]] = 100 * float((scores < 1 / len(scores)).mean())
    shares = list(prompts.values())
    return [mean(shares)] if len(shares) >= 5 else shares


def studied(value: Callable[[Row], float], join: Callable[[Iterable[float]], float]) -> Callable[[str], list[float]]:
    def values(model: str) -> list[float]:
        return [join(value(row) for row in rows_of(model, "lazy, schedule=table1"))]

    return values


CLAIMS: dict[str, Callable[[str], list[float]]] = {
    "TTFT, in decoding steps of the baseline": baseline_share(lambda row: mean(row["times"]["decode_step_s"])),
    "TTFT, % of the baseline's generation time": baseline_share(lambda row: row["times"]["total_s"] / 100),
    "Prompt tokens, mean over the examples": plain_mean(lambda row: row["tokens"], "baseline"),
    "Generated tokens, mean over the examples": plain_mean(lambda row: len(row["token_ids"]), "baseline"),
    "Most prompt tokens get less than an even share of the last token's attention, %": below_even_share,
    "Never slower: generation speedup, task by task": by_task(SHOWN["generation speedup"]),
    "No token twice in a layer: largest share of the prompt that a layer ran, %": studied(
        lambda row: 100 * max(map(max, row["cost"]["computed"])) / row["tokens"], max
    ),
    "Score kept, % (mean over tasks)": over_all(SHOWN["% of baseline"]),
    "TTFT speedup (mean over tasks)": over_all(TTFT_SPEEDUP),
    "Faster to the first token: TTFT speedup, task by task": by_task(TTFT_SPEEDUP),
    "Prompt compression's TTFT speedup (fastest task)": lambda model: [
        max(by_task(TTFT_SPEEDUP, "prompt_compression, keep=table1, unit=sentence")(model))
    ],
    "Score kept at a measured 2.34x, % (multi-document QA)": kept_at(2.34),
    "Score kept at a measured 3x, % (multi-document QA)": kept_at(3),
    "Prompt tokens computed by the end, % (mean over tasks)": over_all(SHOWN["% computed"]),
    "Generation speedup (mean over tasks)": over_all(SHOWN["generation speedup"]),
    "First layers compute more of the prompt than the last, points": studied(
        lambda row: 100 * (row["cost"]["computed"][-1][0] - row["cost"]["computed"][-1][-1]) / row["tokens"], mean
    ),
    **{
        f"{claim}, {unit}": make(column)
        for unit, column in (
            ("points", "score"), ("nats of KL (ours)", "kl"), ("nats of the answer's KL (ours)", "answer_kl"),
        )
        for claim, make in (
            ("Better than static pruning at one speedup, task by task", lambda one: lead(one, "static_pruning")),
            ("Better than random token drop at one speedup, task by task", lambda one: lead(one, "random_drop")),
            ("Keeping more is better, ratio by ratio", lambda one: gains(one, 1)),
            ("Pruning later is better, layer by layer", lambda one: gains(one, 0)),
        )
    },
}  # fmt: skip
VERDICTS = [line for line in lines_of("verdicts") if line["model"].startswith("smollm2")]


@pytest.mark.parametrize("line", VERDICTS, ids=lambda line: line["claim"])
def test_claims(line: dict[str, str]) -> None:
    if line["ours"] == "-":
        assert line["verdict"].startswith("not run") or line["verdict"] in ("undecided", "-"), line
        return
    values = CLAIMS[line["claim"]](line["model"])
    if " to " not in line["ours"]:
        check(line["ours"], values[0], line)
        return
    low, high, hold, parts, fail = re.fullmatch(
        r"(\S+) to (\S+): (\d+) of (\d+) hold, (\d+) do not", line["ours"]
    ).groups()  # type: ignore[union-attr]
    check(low, min(values), line)
    check(high, max(values), line)
    assert int(parts) == len(values), line
    # no interval lies on the side of the bound on which its value is not
    bound = float(line["expected"].split()[1])
    assert int(hold) <= sum(value >= bound for value in values), line
    assert int(fail) <= sum(value <= bound for value in values), line
    verdict = "does not hold" if int(fail) else "holds" if hold == parts else "undecided"
    assert line["verdict"] == verdict or line["verdict"].startswith("not run: needs"), line


def test_every_claim_of_the_paper_is_there() -> None:
    assert {line["claim"] for line in VERDICTS} == CLAIMS.keys()


def test_a_wrong_number_is_seen() -> None:
    check("1.23 ±0.10", 1.234, "")
    check("-", math.nan, "")
    for cell, value in (("1.23 ±0.10", 1.24), ("-", 1.0), ("0.57 [0.60, 0.73]", 0.57), ("12*", 13.0)):
        with pytest.raises(AssertionError):
            check(cell, value, "")
