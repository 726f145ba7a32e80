"""GraphWalks (`openai/graphwalks`): a graph fills the context; which nodes does a search, or a node's parents, give?

Rows come through the package `datasets`, or from the dataset's parquet files in `data.dir`. With `graphwalks.lengths`,
rows are made here instead, at any length and without a network: random directed graphs of hexadecimal nodes, with our
own wording of the same two questions. Answers are many edges apart, so no part of the context is enough: the test of
aggregation that needles lack. The score is the dataset's: F1 of the nodes in the last line, `Final Answer: [a, b]`.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, product
from typing import TYPE_CHECKING, Any

from eval.benchmarks.downloads import is_cached, missing_from_hub, rows_from_files, rows_from_hub
from eval.benchmarks.prompts import build_prompt, tokenizer_for_rows
from eval.benchmarks.rows import Fields, canonical, check_fields, is_text, is_texts, parsed, usable
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite
from lazyllm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPOSITORY = "openai/graphwalks"
TEMPLATE = "{instruction}{context}{input}"
MAX_NEW_TOKENS = {"hub": 2048, "made": 512}
VERSION = 1

_GIVE = "data.dir=FOLDER with its parquet files, or graphwalks.lengths=[8000] for made rows"
_FINAL = re.compile(r"Final Answer: \[(.*)\]")
_OUT_DEGREE = 2
_DEPTHS = (1, 2, 3)

_INSTRUCTION = """A directed graph is given as a list of edges, one in each line. Answer the question after the list.

"""
_QUESTIONS = {
    "bfs": "\nStart a breadth-first search at node {node}. Which nodes does it reach after exactly {depth} steps, and "
    "not earlier? Leave out {node} itself.",
    "parents": "\nWhich nodes have an edge to node {node}? Leave out {node} itself.",
}
_FORM = "\nEnd with a line of this form, with all of these nodes: Final Answer: [node, node]\n"

_FIELDS: Fields = (
    ("prompt", lambda value: is_text(value) and bool(value.strip()), "a string that is not empty"),
    ("answer_nodes", is_texts, "a list of strings"),
    ("problem_type", lambda value: value in _QUESTIONS, f"one of {', '.join(_QUESTIONS)}"),
)


@dataclass
class GraphWalksConfig:
    """lengths: maximum tokens of a made prompt, its chat template and its answer together; null reads the dataset.

    repeats: number of made rows for each length. seed: of the graphs.
    """

    lengths: list[int] | None = None
    repeats: int = 10
    seed: int = 42


def score(dataset: Dataset, answer: str, answers: Sequence[str], all_classes: Sequence[str] | None = None) -> float:
    """F1 of the sets of nodes, 0 to 1: 1 if both are empty, 0 without a final line.

    answers: the gold final line.
    """
    nodes, gold = _final_nodes(answer), _final_nodes(answers[0])
    if nodes is None or gold is None:
        return 0.0
    return 2 * len(nodes & gold) / (len(nodes) + len(gold)) if nodes or gold else 1.0


def _final_nodes(answer: str) -> set[str] | None:
    """The nodes of the last line that is not blank; None if it has no final answer."""
    lines = [line for line in answer.split("\n") if line.strip()]
    match = _FINAL.search(lines[-1]) if lines else None
    return None if match is None else {node.strip() for node in match[1].split(",") if node.strip()}


def check(dataset: Dataset, settings: DataSettings) -> None:
    """Refuse settings that allow no rows. Raises UserError."""
    options = _options(settings)
    if options.lengths is not None and (not options.lengths or min(options.lengths) < 1):
        raise UserError(f"graphwalks.lengths={options.lengths}: expected a list of numbers of tokens, or null")
    if options.repeats < 1:
        raise UserError(f"graphwalks.repeats={options.repeats}: expected a number of rows of at least 1")


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The rows of one type of problem. Raises UserError for an unusable row or file, or a length that is too short."""
    options = _options(settings)
    if options.lengths is not None:
        examples, skipped = tuple(_made(dataset, settings)), ()
        facts = [VERSION, options.lengths, options.seed, repr(settings.chat), [_row(row) for row in examples[:1]]]
        source, sha256, kind = f"made graphs, seed {options.seed}", hashlib.sha256(canonical(facts)).hexdigest(), "made"
    else:
        numbered, source, sha256 = _read(settings)
        others = set(_QUESTIONS) - {_kind(dataset)}
        rows = [(where, row) for where, row in numbered if row.get("problem_type") not in others]
        outcomes = (
            (where, parsed(row, partial(_example, dataset, number))) for number, (where, row) in enumerate(rows)
        )
        expected = "rows with prompt, answer_nodes and problem_type"
        examples, skipped = usable(outcomes, source, settings.on_error, expected)
        kind = "hub"
    return LoadedDataset(
        dataset=dataset,
        examples=examples,
        template=TEMPLATE,
        max_new_tokens=MAX_NEW_TOKENS[kind],
        data_sha256=sha256,
        config_sha256=hashlib.sha256(canonical([TEMPLATE, MAX_NEW_TOKENS[kind]])).hexdigest(),
        source=source,
        skipped=skipped,
        total=None if options.lengths is None else options.repeats * len(options.lengths),
    )


SUITE = Suite(
    name="graphwalks",
    version=VERSION,
    datasets=tuple(
        Dataset(f"graphwalks_{kind}", "aggregation", "node_f1", suite="graphwalks", decode_halves=False)
        for kind in _QUESTIONS
    ),
    load=load,
    score=score,
    whole="graphwalks",
    options=GraphWalksConfig,
    check=check,
    missing=lambda dataset, settings: (
        None if settings.dir or _options(settings).lengths is not None else missing_from_hub(REPOSITORY, _GIVE)
    ),
    cached=partial(is_cached, REPOSITORY),
    rows=lambda dataset, settings: map(_row, load(dataset, settings).examples[: settings.limit]),
    length=lambda settings: max(_options(settings).lengths or [0]) or None,
    shorter="give smaller graphwalks.lengths",
)


def _options(settings: DataSettings) -> GraphWalksConfig:
    return settings.options if settings.options is not None else GraphWalksConfig()


def _kind(dataset: Dataset) -> str:
    return dataset.name.removeprefix("graphwalks_")


def _read(settings: DataSettings) -> tuple[list[tuple[str, dict[str, Any]]], str, str]:
    if settings.dir is not None:
        return rows_from_files(settings.dir, "*.parquet")
    return rows_from_hub(REPOSITORY, None, "train", _GIVE)


def _example(dataset: Dataset, number: int, row: Any) -> Example:
    """The row's example: methods may shorten what comes before the last operation. Raises UserError."""
    check_fields(row, _FIELDS)
    context, operation, question = row["prompt"].rpartition("Operation:")
    return Example(
        dataset=dataset.name,
        id=f"{dataset.name}-{number}",
        input=operation + question if operation else "",
        context=context if operation else row["prompt"],
        answers=(_final_line(row["answer_nodes"]),),
        all_classes=(),
        length=len(row["prompt"]),
        language="en",
    )


def _final_line(nodes: Iterable[str]) -> str:
    return f"Final Answer: [{', '.join(nodes)}]"


def _row(example: Example) -> dict[str, Any]:
    prompt = example.instruction + example.context + example.input
    return {
        "prompt": prompt,
        "answer_nodes": sorted(_final_nodes(example.answers[0]) or ()),
        "prompt_chars": len(prompt),
        "problem_type": example.dataset.removeprefix("graphwalks_"),
    }


# ------------------------------------------------------------------------------------------------------------ made rows


def _made(dataset: Dataset, settings: DataSettings) -> Iterator[Example]:
    """An example for every length, `repeats` times, each with another graph."""
    options = _options(settings)
    tokenizer = tokenizer_for_rows(settings.model, "graphwalks")
    for repeat, length in islice(product(range(options.repeats), options.lengths or ()), settings.limit):
        yield _longest(dataset, f"{dataset.name}-{length}-{options.seed}-{repeat:02d}", length, settings, tokenizer)


def _longest(
    dataset: Dataset, identity: str, length: int, settings: DataSettings, tokenizer: PreTrainedTokenizerBase
) -> Example:
    """The example with the most nodes, within 2 %, that leaves room for the answer. Raises UserError if none does."""

    def tokens(nodes: int) -> int:
        prompt = build_prompt(make_example(dataset, identity, nodes, length), TEMPLATE, tokenizer, chat=settings.chat)
        return len(prompt.token_ids) + MAX_NEW_TOKENS["made"]

    least = tokens(8)
    nodes = 8 + max(0, length - least) * 64 // (tokens(72) - least)
    while nodes >= 8 and tokens(nodes) > length:
        nodes = min(nodes - 1, nodes * 98 // 100)
    if nodes < 8 or least > length:
        raise UserError(f"graphwalks.lengths: {length} is too short: 8 nodes and the answer take {least} tokens")
    return make_example(dataset, identity, nodes, length)


def make_example(dataset: Dataset, identity: str, nodes: int, length: int) -> Example:
    """A random graph of `nodes` nodes, each with two edges to others, and a question about it, all by `identity`."""
    rng = random.Random(identity)
    names = [f"{value:08x}" for value in rng.sample(range(16**8), nodes)]
    edges = [
        (name, target)
        for place, name in enumerate(names)
        for target in rng.sample(names[:place] + names[place + 1 :], _OUT_DEGREE)
    ]
    rng.shuffle(edges)
    node, depth = rng.choice(edges)[1], rng.choice(_DEPTHS)
    if _kind(dataset) == "parents":
        answer, needed = {source for source, target in edges if target == node}, [node == edge[1] for edge in edges]
    else:
        answer, before = {node}, set[str]()
        for _ in range(depth):
            before |= answer
            answer = {target for source, target in edges if source in answer} - before
        needed = [source in before for source, _ in edges]
    texts = [f"{source} -> {target}\n" for source, target in edges]
    ends = list(accumulate(map(len, texts)))
    return Example(
        dataset=dataset.name,
        id=identity,
        input=_QUESTIONS[_kind(dataset)].format(node=node, depth=depth) + _FORM,
        context="".join(texts),
        answers=(_final_line(sorted(answer)),),
        all_classes=(),
        length=length,
        language="en",
        instruction=_INSTRUCTION,
        evidence=tuple((end - len(text), end) for text, end, hit in zip(texts, ends, needed, strict=True) if hit),
        groups=(f"length={length}",),
    )
