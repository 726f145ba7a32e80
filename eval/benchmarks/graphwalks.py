"""GraphWalks (`openai/graphwalks`): a graph fills the context; which nodes does a search reach, or have an edge to one?

Rows come through the package `datasets`, or from its parquet files in `data.dir`. With `graphwalks.lengths` they are
made here instead, at any length and without a network: random directed graphs of hexadecimal nodes, with our wording of
both questions. The edges of an answer are scattered, so this is the test of aggregation that needles lack. The score is
the dataset's: F1 of the nodes in the last line, `Final Answer: [a, b]`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, product
from typing import Any

from eval.benchmarks.downloads import is_cached, missing_from_hub, rows_from_files, rows_from_hub
from eval.benchmarks.prompts import build_prompt, tokenizer_for_rows
from eval.benchmarks.rows import check_fields, is_filled, is_texts, loaded, sha256_of
from eval.benchmarks.suite import TEMPLATE, Dataset, DataSettings, Example, LoadedDataset, Suite
from lazyllm.errors import UserError

REPOSITORY = "openai/graphwalks"
VERSION = 1
ANSWER_TOKENS = {"hub": 2048, "made": 512}

_GIVE = "its parquet files, or graphwalks.lengths=[8000] for made rows"
_FINAL = re.compile(r"Final Answer: \[(.*)\]")
_INSTRUCTION = "A directed graph is given as a list of edges, one in each line. Answer the question after the list.\n\n"
_QUESTIONS = {
    "bfs": "Start a breadth-first search at node {node}. Which nodes does it reach after exactly {depth} steps, not "
    "earlier?",
    "parents": "Which nodes have an edge to node {node}?",
}
_FORM = "\nEnd with a line of this form, with all of these nodes: Final Answer: [node, node]\n"
_FIELDS = (
    ("prompt", is_filled, "a string that is not empty"),
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
    """F1 of the sets of nodes: 1 if both are empty, 0 without a final line. answers: the gold final line."""
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
    options = settings.options
    if options.repeats < 1 or (options.lengths is not None and min(options.lengths, default=0) < 1):
        raise UserError(
            f"graphwalks.lengths={options.lengths}, graphwalks.repeats={options.repeats}: expected a list of numbers "
            "of tokens, or null, and at least 1 row"
        )


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The rows of one type of problem. Raises UserError for an unusable row or file, or a length that is too short."""
    options = settings.options
    if options.lengths is None:
        rows, source, sha256 = (
            rows_from_hub(REPOSITORY, None, "train", _GIVE)
            if settings.dir is None
            else rows_from_files(settings.dir, "*.parquet")
        )
        others = set(_QUESTIONS) - {_kind(dataset)}
        mine = [(where, row) for where, row in rows if row.get("problem_type") not in others], source, sha256
        expected = "prompt, answer_nodes and problem_type"
        return loaded(dataset, mine, partial(_example, dataset), settings.on_error, expected, ANSWER_TOKENS["hub"])
    examples, max_new_tokens = tuple(_made(dataset, settings, options)), ANSWER_TOKENS["made"]
    facts = [VERSION, options.lengths, options.seed, repr(settings.chat), examples[0].official]
    return LoadedDataset(
        dataset,
        examples,
        max_new_tokens,
        sha256_of(facts),
        sha256_of([TEMPLATE, max_new_tokens]),
        f"made graphs, seed {options.seed}",
        total=options.repeats * len(options.lengths),
    )


SUITE = Suite(
    name="graphwalks",
    version=VERSION,
    datasets=tuple(
        Dataset(f"graphwalks_{kind}", "aggregation", "node_f1", suite="graphwalks", truncate=False)
        for kind in _QUESTIONS
    ),
    load=load,
    score=score,
    whole="graphwalks",
    options=GraphWalksConfig,
    check=check,
    missing=lambda dataset, settings: (
        missing_from_hub(REPOSITORY, _GIVE) if settings.dir is None and settings.options.lengths is None else None
    ),
    cached=partial(is_cached, REPOSITORY),
    length=lambda settings: max(settings.options.lengths or [0]) or None,
    shorter="give smaller graphwalks.lengths",
)


def _kind(dataset: Dataset) -> str:
    return dataset.name.removeprefix("graphwalks_")


def _example(dataset: Dataset, row: Any, number: int) -> Example:
    """A hub's row. Methods may shorten what precedes the last operation. Raises UserError."""
    check_fields(row, _FIELDS)
    context, operation, question = row["prompt"].rpartition("Operation:")
    nodes = f"Final Answer: [{', '.join(row['answer_nodes'])}]"
    identity, length = f"{dataset.name}-{number}", len(row["prompt"])
    return Example(dataset.name, identity, operation + question, context, (nodes,), (), length, "en", official=row)


def _made(dataset: Dataset, settings: DataSettings, options: GraphWalksConfig) -> Iterator[Example]:
    """For every length, `repeats` times, the largest graph within 2 % that leaves room for the answer."""
    tokenizer = tokenizer_for_rows(settings.model, "graphwalks")
    for repeat, length in islice(product(range(options.repeats), options.lengths or ()), settings.limit):
        identity = f"{dataset.name}-{length}-{options.seed}-{repeat:02d}"

        def excess(nodes: int, identity: str = identity, length: int = length) -> int:
            prompt = build_prompt(
                make_example(dataset, identity, nodes, length), TEMPLATE, tokenizer, chat=settings.chat
            )
            return len(prompt.token_ids) + ANSWER_TOKENS["made"] - length

        least = excess(8)
        if least > 0:
            raise UserError(f"graphwalks.lengths: {length} is too short for 8 nodes and an answer by {least} tokens")
        nodes = 8 - least * 64 // (excess(72) - least)
        while excess(nodes) > 0:
            nodes = min(nodes - 1, nodes * 98 // 100)
        yield make_example(dataset, identity, nodes, length)


def make_example(dataset: Dataset, identity: str, nodes: int, length: int) -> Example:
    """A random graph of at least 3 nodes, each with edges to two others, and a question about it, by `identity`."""
    rng = random.Random(identity)
    names = [f"{value:08x}" for value in rng.sample(range(16**8), nodes)]
    steps = [sorted(rng.sample(range(1, nodes), 2)) for _ in names]
    edges = [(name, names[(place + step) % nodes]) for place, name in enumerate(names) for step in steps[place]]
    rng.shuffle(edges)
    node, depth = rng.choice(edges)[1], rng.randint(1, 3)
    answer, before = {node}, set[str]()
    if _kind(dataset) == "parents":
        answer, needed = {source for source, target in edges if target == node}, [edge[1] == node for edge in edges]
    else:
        for _ in range(depth):
            before |= answer
            answer = {target for source, target in edges if source in answer} - before
        needed = [source in before for source, _ in edges]
    lines = [f"{source} -> {target}\n" for source, target in edges]
    ends = list(accumulate(map(len, lines)))
    context, kind = "".join(lines), _kind(dataset)
    asked = "\n" + _QUESTIONS[kind].format(node=node, depth=depth) + f" Leave out {node} itself." + _FORM
    prompt = _INSTRUCTION + context + asked
    return Example(
        dataset=dataset.name,
        id=identity,
        input=asked,
        context=context,
        answers=(f"Final Answer: [{', '.join(sorted(answer))}]",),
        all_classes=(),
        length=length,
        language="en",
        instruction=_INSTRUCTION,
        evidence=tuple((end - len(line), end) for line, end, hit in zip(lines, ends, needed, strict=True) if hit),
        groups=(f"length={length}",),
        official={
            "prompt": prompt, "answer_nodes": sorted(answer), "prompt_chars": len(prompt), "problem_type": kind,
        },
    )  # fmt: skip
