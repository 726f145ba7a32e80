"""GraphWalks (`openai/graphwalks`): a graph fills the context; which nodes does a search reach, or have an edge to one?

Rows come through the package `datasets`, or from its parquet files in `data.dir`. With `graphwalks.lengths` they are
made here instead, at any length and without a network: random directed graphs of hexadecimal nodes, with our wording of
both questions. The edges of an answer are scattered, so this is the test of aggregation that needles lack.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any

from eval.benchmarks.downloads import HubDataset
from eval.benchmarks.prompts import build_prompt, tokenizer_for_rows
from eval.benchmarks.rows import FILLED, TEXTS, check_fields, loaded, made_here, one_of
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite, setting
from lazyllm.errors import UserError, require

VERSION = 2
ANSWER_TOKENS = {"hub": 2048, "made": 512}

_HUB = HubDataset("openai/graphwalks", "its parquet files, or graphwalks.lengths=[8000] for made rows")
_INSTRUCTION = "A directed graph is given as a list of edges, one in each line. Answer the question after the list.\n\n"
_QUESTIONS = {
    "bfs": "Start a breadth-first search at node {node}. Which nodes does it reach after exactly {depth} steps, not "
    "earlier?",
    "parents": "Which nodes have an edge to node {node}?",
}
_FORM = "\nEnd with a line of this form, with all of these nodes: Final Answer: [node, node]\n"
_FIELDS = {"prompt": FILLED, "answer_nodes": TEXTS, "problem_type": one_of(_QUESTIONS)}


@dataclass
class GraphWalksConfig:
    lengths: list[int] | None = setting(
        None, "maximum tokens of a made prompt, its chat template and its answer together; `null` reads the dataset"
    )
    repeats: int = setting(10, "made rows for each length")
    seed: int = setting(42, "of the made graphs")


def check(dataset: Dataset, settings: DataSettings) -> None:
    """Refuse settings that allow no rows. Raises UserError."""
    lengths, repeats = settings.options.lengths, settings.options.repeats
    fits = lengths is None or (min(lengths, default=0) > 0 and len({*lengths}) == len(lengths))
    require(fits, "graphwalks.lengths", lengths, "different numbers of tokens, or null")
    require(repeats > 0, "graphwalks.repeats", repeats, "1 or more")


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The rows of one type of problem. Raises UserError for an unusable row or file, or a length that is too short."""
    options, tokens = settings.options, ANSWER_TOKENS["hub" if settings.options.lengths is None else "made"]
    if options.lengths is None:
        rows, source, sha256 = _HUB.rows(settings, "*.parquet")
        others = _QUESTIONS.keys() - {dataset.name.removeprefix("graphwalks_")}
        mine = [(where, row) for where, row in rows if row.get("problem_type") not in others], source, sha256
        return loaded(dataset, mine, partial(_example, dataset), settings.on_error, tokens)
    examples = tuple(_made(dataset, settings, tokens))
    hashed = [VERSION, options.lengths, options.seed, repr(settings.chat), examples[0].official]
    source, total = f"made graphs, seed {options.seed}", options.repeats * len(options.lengths)
    return made_here(dataset, examples, tokens, hashed, source, total)


SUITE = Suite(
    name="graphwalks",
    version=VERSION,
    datasets=tuple(
        Dataset(f"graphwalks_{kind}", "aggregation", "node_f1", suite="graphwalks", truncate=False)
        for kind in _QUESTIONS
    ),
    load=load,
    options=GraphWalksConfig,
    check=check,
    missing=lambda dataset, settings: _HUB.missing(dataset, settings) if settings.options.lengths is None else None,
    length=lambda settings: max(settings.options.lengths or [0]) or None,
    shorter="give smaller graphwalks.lengths",
)


def _example(dataset: Dataset, row: Any, number: int) -> Example:
    """A hub's row. Methods may shorten what precedes the last operation."""
    check_fields(row, _FIELDS)
    context, operation, question = row["prompt"].rpartition("Operation:")
    nodes = f"Final Answer: [{', '.join(row['answer_nodes'])}]"
    identity, length = f"{dataset.name}-{number}", len(row["prompt"])
    return Example(dataset.name, identity, operation + question, context, (nodes,), length=length, official=row)


def _made(dataset: Dataset, settings: DataSettings, answer_tokens: int) -> Iterator[Example]:
    """For every length, `repeats` times, the largest graph within 2 % that leaves room for the answer."""
    tokenizer, options = tokenizer_for_rows(settings.model, "graphwalks"), settings.options

    def excess(example: Example) -> int:
        prompt = build_prompt(example, dataset, tokenizer, chat=settings.chat)
        return len(prompt.token_ids) + answer_tokens - example.length

    for repeat, length in islice(product(range(options.repeats), options.lengths), settings.limit):
        identity = f"{dataset.name}-{length}-{options.seed}-{repeat:02d}"
        make = partial(make_example, dataset, identity, length=length)
        least = excess(make(nodes=8))
        if least > 0:
            raise UserError(f"graphwalks.lengths: {length} is too short for 8 nodes and an answer by {least} tokens")
        nodes = 8 - least * 64 // (excess(make(nodes=72)) - least)
        while excess(example := make(nodes=nodes)) > 0:
            nodes = min(nodes - 1, nodes * 98 // 100)
        yield example


def make_example(dataset: Dataset, identity: str, nodes: int, length: int) -> Example:
    """A random graph of at least 3 nodes, each with edges to two others, and a question about it, by `identity`."""
    rng, kind = random.Random(identity), dataset.name.removeprefix("graphwalks_")
    names = [f"{value:08x}" for value in rng.sample(range(16**8), nodes)]
    steps = [(place, step) for place in range(nodes) for step in sorted(rng.sample(range(1, nodes), 2))]
    edges = [(names[place], names[(place + step) % nodes]) for place, step in steps]
    rng.shuffle(edges)
    node, depth = rng.choice(edges)[1], rng.randint(1, 3)
    answer, before = {node}, set[str]()
    if kind == "parents":
        answer, needed = {source for source, target in edges if target == node}, [edge[1] == node for edge in edges]
    else:
        for _ in range(depth):
            before |= answer
            answer = {target for source, target in edges if source in answer} - before
        needed = [source in before for source, _ in edges]
    lines = [f"{source} -> {target}\n" for source, target in edges]
    context, width = "".join(lines), len(lines[0])
    asked = "\n" + _QUESTIONS[kind].format(node=node, depth=depth) + f" Leave out {node} itself." + _FORM
    prompt, gold = _INSTRUCTION + context + asked, sorted(answer)
    return Example(
        dataset=dataset.name,
        id=identity,
        input=asked,
        context=context,
        answers=(f"Final Answer: [{', '.join(gold)}]",),
        length=length,
        instruction=_INSTRUCTION,
        evidence=tuple((place * width, (place + 1) * width) for place, hit in enumerate(needed) if hit),
        groups=(f"length={length}",),
        official=dict(prompt=prompt, answer_nodes=gold, prompt_chars=len(prompt), problem_type=kind),
    )
