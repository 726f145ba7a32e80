"""The embedded suite: six small datasets, one per LongBench task, generated for the tiny model.

Every row is drawn from a seeded generator and kept in the cache folder. Rows have LongBench's format, so LongBench's
code runs them. All six need the same skill, finding the words after a key in a long prompt: a model of a million
parameters can learn it, and pruning can break it.

| name     | task           | needles in the context           | the prompt ends with  | the answer                |
|----------|----------------|----------------------------------|-----------------------|---------------------------|
| lookup   | single_doc_qa  | `entry KEY a b c.`               | `Question: entry KEY` | `a b c.`                  |
| hops     | multi_doc_qa   | `link KEY K2.`, `entry K2 a b.`  | `Chain: link KEY`     | `K2 a b.`                 |
| digest   | summarization  | `entry KEY a b c.`, `first KEY.` | `Digest: first`       | `a b c. second d e f. ...`|
| shots    | few_shot       | `Example ... KEY class.` thrice  | `Example ... KEY`     | `class.`                  |
| retrieve | synthetic      | `a b c 7.` in paragraph 7        | `Where: a b c`        | `7.`                      |
| complete | code           | `proc KEY a b c;`                | `call KEY`            | `a b c;`                  |

All other needles of a context are distractors of the same form. Needles occur at every depth. A prompt has exactly 512,
1024 or 2048 tokens of the tiny tokenizer (`<|begin|>` included), because a context is a list of strings of one token
each; a leading space belongs to its word.

The hash of a row's text determines whether it is of the test split (`is_test`), independent of the seed. So no training
sequence (`scripts/dev/train.py` of commit e6da5df7 uses the same function) holds a question of the test split.

With `turns=N` a row asks N questions of its context, each about another needle: its own question first, then others in
an order drawn by the row's seed. They follow each other as in training: the answer, its end token, and the words
between context and input. The other questions are about test contexts, but belong to no split.
"""

import hashlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from eval.benchmarks.downloads import made_once
from eval.benchmarks.rows import canonical, load_lines
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite
from lazyllm.errors import UserError
from lazyllm.files import cache_folder

LENGTHS = (512, 1024, 2048)  # of prompts, in tokens of the tiny tokenizer, in turn over the rows
# Special tokens: the first of every prompt, the last of every answer, filling in training
BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"

Tokens = list[str]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The words of answers
VALUES = _words(
    """
    amber anchor apple arrow autumn badge bamboo banner barrel basket beacon beaver bishop blanket blossom
    bottle bridge bronze bucket button cabin cactus camel candle canoe canyon carbon carpet castle cedar cello
    chalk chapel cherry chimney cinder circle clover cobalt coffee comet copper coral cotton cousin cradle
    crater cricket crimson crystal curtain cypress dagger daisy desert diamond dolphin donkey dragon drawer
    eagle ember emerald engine envelope falcon feather fennel ferry fiddle flannel flint flute forest fossil
    fountain galaxy garlic garnet geyser ginger glacier goblet granite grape gravel guitar hammer harbor harvest
    hazel helmet heron hollow honey horizon hornet icicle indigo insect island ivory jacket jaguar jasmine jelly
    jewel jungle juniper kernel kettle kitten ladder lagoon lantern lattice laurel lemon lentil leopard library
    lilac linen lizard lobster locket lotus lumber magnet mango maple marble mantle meadow medal melon mirror
    monsoon mortar mosaic muffin mustard nectar needle nickel nutmeg oasis ocean olive onion opal orange orchard
    orchid otter oyster paddle palace panther papaya parcel parrot pasture pebble pelican pepper piano pigeon
    pillow pioneer planet plaza plum pocket pollen pony poplar poppy portal potato prairie prism pumpkin puppet
    puzzle python quarry quartz quilt rabbit raccoon radish raven reef ribbon ridge rocket rooster rosemary ruby
    saddle saffron salmon sapphire satin saturn scarlet shadow shelter signal silver socket sparrow spider
    spinach spiral spruce stable statue summit sunset swallow syrup tablet tango teapot temple thicket thistle
    thunder ticket timber tobacco tomato topaz torch tractor trumpet tulip tunnel turban turtle umber valley
    vanilla velvet vessel violet violin volcano wagon walnut walrus whistle willow window winter wizard yarrow
    yogurt zebra zenith zephyr zinc
    """
)

_DETERMINERS = _words("the a one this that every some another")
_ADJECTIVES = _words("old small quiet long busy narrow pleasant dusty tall gentle plain early late distant common")
_NOUNS = _words("town road house man woman market garden boat river table letter door morning evening story teacher")
_VERBS = _words("was stood came went stayed looked seemed turned waited remained")
_PREPOSITIONS = _words("in near behind under over with from beside")
_ADVERBS = _words("again slowly there today often perhaps")
_CODE = _words("set add load store test jump push pop x y z w")

_AGAIN = (_DETERMINERS, _ADJECTIVES, _NOUNS)
_PATTERN = (*_AGAIN, _VERBS, _PREPOSITIONS, *_AGAIN, _ADVERBS)  # of a filler sentence: a word of each in turn

# The class names of `shots`; none is a part of another
CLASSES = ("animal", "color", "food", "machine", "number", "person", "sound", "place")
PARAGRAPHS = 40  # the highest paragraph number of `retrieve`, and document number of `hops`
ORDINALS = ("first", "second", "third")

# The prompts, in the format of LongBench's `dataset2prompt.json`: placeholders {context} and {input}
TEMPLATES: dict[str, str] = {
    "lookup": "Ledger: {context}\nQuestion: entry {input}",
    "hops": "Documents:\n{context}\nChain: link {input}",
    "digest": "Notes: {context}\nDigest: {input}",
    "shots": "Learn:\n{context}\nExample {input}",
    "retrieve": "Pages:\n{context}\nWhere: {input}",
    "complete": "File:\n{context}\ncall {input}",
}
# The longest answer, its end token and a little more
MAX_NEW_TOKENS: dict[str, int] = {"lookup": 8, "hops": 8, "digest": 20, "shots": 4, "retrieve": 4, "complete": 8}
NAMES = tuple(TEMPLATES)
MAX_TURNS = 8  # questions of a row: the shortest contexts of most datasets have no more needles
ROWS = 240  # of each dataset, 80 of each prompt length


@cache
def keys() -> tuple[str, ...]:
    """The 256 invented names that facts are filed under, such as "bavim", in a fixed shuffled order."""
    names = ["".join(letters) for letters in product("bdgklmnprstvz", "aeiou", "dklmnrvz", "aiou", "klmnrsx")]
    random.Random("keys").shuffle(names)
    taken = {*VALUES, *_NOUNS, *_ADJECTIVES}
    return tuple(name for name in names if name not in taken)[:256]


def head(name: str) -> Tokens:
    """The tokens of dataset `name`'s prompt before the context, the begin token included."""
    return [BEGIN, *_tokens(TEMPLATES[name].partition("{context}")[0])]


def tail(name: str) -> Tokens:
    """The tokens of dataset `name`'s prompt between the context and the input."""
    return _tokens(TEMPLATES[name].partition("{context}")[2].removesuffix("{input}"))


def _tokens(text: str) -> Tokens:
    """Part of a template as tokens; a space at its end belongs to the word after it."""
    return re.findall(r" ?\w+|[^ \w]", text)


@dataclass(frozen=True)
class Level:
    """The difficulty of a context. The suite has a needle for each 32 tokens of a prompt; training starts with fewer.

    context: tokens of the context. facts: needles in it. keys, values: the numbers of names and words to draw from.
    """

    context: int
    facts: int
    keys: int = 256
    values: int = len(VALUES)


@dataclass(frozen=True)
class Question:
    """A question about a context: the tokens of the input, and of the answer without the end token.

    evidence: the needles that hold the answer, as in the context.
    """

    input: Tokens
    answer: Tokens
    evidence: list[Tokens]


def _draw(rng: random.Random, pool: Sequence[str], count: int) -> Tokens:
    """`count` words of the pool as tokens, all different if the pool is large enough."""
    words = rng.sample(pool, count) if count <= len(pool) else rng.choices(pool, k=count)
    return [f" {word}" for word in words]


def draw_values(rng: random.Random, level: Level, sizes: Sequence[int], end: str = ".") -> list[Tokens]:
    """Answers of these numbers of words, each followed by `end`; no word occurs twice if there are enough."""
    words = iter(_draw(rng, VALUES[: level.values], sum(sizes)))
    return [[*islice(words, size), end] for size in sizes]


def filler_sentence(rng: random.Random, size: int) -> Tokens:
    """A filler sentence of exactly `size` tokens, full stop included."""
    return [f" {rng.choice(_PATTERN[i % len(_PATTERN)])}" for i in range(size - 1)] + ["."]


def _sizes(rng: random.Random, total: int, low: int, high: int) -> list[int]:
    """Sizes of `low` to `high` whose sum is `total`; the last one may be smaller."""
    sizes: list[int] = []
    while total > 0:
        size = min(total, rng.randint(low, high))
        sizes.append(size)
        total -= size
    return sizes


def among_filler(rng: random.Random, needles: list[Tokens], total: int) -> Tokens:
    """`needles` in order, at random depths among filler sentences, `total` tokens together."""
    filler = [filler_sentence(rng, size) for size in _sizes(rng, total - sum(map(len, needles)), 5, 10)]
    places = set(rng.sample(range(len(needles) + len(filler)), len(needles)))
    waiting, filling = iter(needles), iter(filler)
    tokens: Tokens = []
    for place in range(len(needles) + len(filler)):
        tokens += next(waiting) if place in places else next(filling)
    return tokens


def _lookup(rng: random.Random, level: Level) -> tuple[Tokens, list[Question]]:
    """Facts of two to four words under a key, among filler."""
    names = _draw(rng, keys()[: level.keys], level.facts)
    answers = draw_values(rng, level, [rng.randint(2, 4) for _ in names])
    facts = zip(names, answers, strict=True)
    questions = [Question([name], answer, [[" entry", name, *answer]]) for name, answer in facts]
    return among_filler(rng, [question.evidence[0] for question in questions], level.context), questions


def _hops(rng: random.Random, level: Level) -> tuple[Tokens, list[Question]]:
    """Documents in which a link leads from one key to another, whose entry is elsewhere."""
    chains = max(1, level.facts // 2)
    names = _draw(rng, keys()[: level.keys], 2 * chains)
    values = draw_values(rng, level, [rng.randint(2, 3) for _ in range(chains)])
    needles: list[Tokens] = []
    questions: list[Question] = []
    for name, second, value in zip(names[:chains], names[chains:], values, strict=True):
        chain = [[" link", name, second, "."], [" entry", second, *value]]
        needles += chain
        questions.append(Question([name], [second, *value], chain))
    rng.shuffle(needles)
    documents = max(1, min(PARAGRAPHS, level.context // 128))
    shares = [needles[i::documents] for i in range(documents)]
    rest = level.context - documents * 4 + 1
    tokens: Tokens = []
    for number, share in enumerate(shares, start=1):
        size = rest // documents if number < documents else rest - rest // documents * (documents - 1)
        tokens += ["Document", f" {number}", ".", *among_filler(rng, share, size), "\n"]
    return tokens[:-1], questions


def _digest(rng: random.Random, level: Level) -> tuple[Tokens, list[Question]]:
    """Three numbered points, each a key that an earlier entry explains; the digest writes these entries in order.

    The context also holds asides of the same form, which are not in the digest, and filler.
    """
    names = _draw(rng, keys()[: level.keys], max(len(ORDINALS), level.facts // 2))
    values = draw_values(rng, level, [3] * len(names))
    pairs = [iter(([" entry", name, *value], [" aside", name, "."])) for name, value in zip(names, values, strict=True)]
    order = [pair for pair in pairs for _ in range(2)]
    rng.shuffle(order)
    needles: list[Tokens] = [next(pair) for pair in order]
    said = [i for i, needle in enumerate(needles) if needle[0] == " aside"]
    answer: Tokens = []
    evidence: list[Tokens] = []
    for place, ordinal in zip(sorted(rng.sample(said, len(ORDINALS))), ORDINALS, strict=True):
        name = needles[place][1]
        value = values[names.index(name)]
        needles[place] = [f" {ordinal}", *needles[place][1:]]
        answer += [f" {ordinal}", *value]
        evidence += [needles[place], [" entry", name, *value]]
    return among_filler(rng, needles, level.context), [Question([" first"], answer[1:], evidence)]


def _shots(rng: random.Random, level: Level) -> tuple[Tokens, list[Question]]:
    """Labelled examples, three for each key, and new ones to label: the last word determines the class."""
    overhead, shown = 5, 3
    count = max(1, min(level.facts // 2, level.context // (shown * (overhead + 2))))
    names = _draw(rng, keys()[: level.keys], count)
    labels = [f" {rng.choice(CLASSES)}" for _ in names]
    lines = [(name, label) for name, label in zip(names, labels, strict=True) for _ in range(shown)]
    rng.shuffle(lines)
    tokens: Tokens = []
    filler = Counter(rng.randrange(len(lines)) for _ in range(level.context + 1 - overhead * len(lines)))
    for number, (name, label) in enumerate(lines):
        tokens += ["Example", *filler_sentence(rng, filler[number] + 1)[:-1], name, label, ".", "\n"]
    questions = [
        Question([*filler_sentence(rng, 4)[:-1], name], [label, "."], [[name, label, "."]])
        for name, label in zip(names, labels, strict=True)
    ]
    return tokens[:-1], questions


def _retrieve(rng: random.Random, level: Level) -> tuple[Tokens, list[Question]]:
    """Numbered paragraphs; the question quotes a sentence of one of them, the answer is its number."""
    count = max(1, min(level.facts // 2, PARAGRAPHS, level.values))
    ends = _draw(rng, VALUES[: level.values], count)
    numbers = [f" {number}" for number in range(1, count + 1)]
    rest = level.context - 4 * count + 1
    sizes = [rest // count + (i < rest % count) for i in range(count)]
    tokens: Tokens = []
    questions: list[Question] = []
    for end, number, size in zip(ends, numbers, sizes, strict=True):
        quote, answer = [*_draw(rng, keys()[: level.keys], 2), end], [number, "."]
        tokens += ["Paragraph", *answer, *among_filler(rng, [[*quote, *answer]], size), "\n"]
        questions.append(Question(quote, answer, [[*quote, *answer]]))
    return tokens[:-1], questions


def _complete(rng: random.Random, level: Level) -> tuple[Tokens, list[Question]]:
    """A file of procedures; the last line calls one of them, the answer is its arguments."""
    names = _draw(rng, keys()[: level.keys], max(1, level.facts // 2))
    answers = draw_values(rng, level, [rng.randint(2, 4) for _ in names], end=";")
    tokens: Tokens = []
    questions: list[Question] = []
    rest = level.context + 1 - sum(map(len, answers)) - 3 * len(names)
    for i, (name, answer) in enumerate(zip(names, answers, strict=True)):
        tokens += ["proc", name, *answer, "\n"]
        share = rest // (len(names) - i)
        rest -= share
        for size in _sizes(rng, share, 6, 8):  # tokens of a line, newline included
            words = [f" {rng.choice(_CODE)}" for _ in range(size - 3)]
            tokens += [" ", *words, ";", "\n"] if words else ["\n"] * size
        questions.append(Question([name], answer, [["proc", name, *answer]]))
    return tokens[:-1], questions


# For each dataset: a context of exactly `level.context` tokens, and all possible questions about it
GENERATORS = dict(zip(NAMES, (_lookup, _hops, _digest, _shots, _retrieve, _complete), strict=True))


def as_text(tokens: Tokens) -> str:
    """Tokens as the text of a field: the space before the first word belongs to the template."""
    return "".join(tokens).removeprefix(" ")


def is_test(context: Tokens, question: Question) -> bool:
    """Whether this question about this context is of the test split: a quarter of all, by the hash of their text."""
    return hashlib.sha256((as_text(context) + "\0" + as_text(question.input)).encode()).digest()[0] % 4 == 0


def _row(name: str, index: int, turns: int) -> tuple[dict[str, Any], list[list[tuple[int, int]]]]:
    """Row `index`, and the evidence of each turn; drawn again until its hash is of the test split.

    `length` is in words, as in LongBench. The prompt's tokens are the third part of `_id`: "lookup-test-1024-0007".
    """
    length = LENGTHS[index % len(LENGTHS)]
    inputs = {"shots": 4, "retrieve": 3}.get(name, 1)
    level = Level(length - len(head(name)) - len(tail(name)) - inputs, facts=length // 32)
    rng = random.Random(f"{name}-test-{index}")
    while True:
        context, questions = GENERATORS[name](rng, level)
        # questions step through the needles by the golden ratio's fraction, so that few rows cover all depths
        turn = (index // len(LENGTHS) * 0.6180339887498949 + rng.random() * 0.1) % 1
        question = questions[int(turn * len(questions))]
        if is_test(context, question):
            break
    others = [other for other in questions if other is not question]
    later = rng.sample(others, len(others))[: turns - 1]
    row = {
        "input": as_text(question.input),
        "context": as_text(context),
        "answers": [_gold(name, question)],
        "length": len(as_text(context).split()),
        "dataset": name,
        "language": "en",
        "all_classes": list(CLASSES) if name == "shots" else None,
        "_id": f"{name}-test-{length}-{index:04d}",
    }
    if later:
        asking = END + TEMPLATES[name].partition("{context}")[2]
        row["turns"] = [
            {"input": asking.replace("{input}", as_text(other.input)), "answers": [_gold(name, other)]}
            for other in later
        ]
    patterns = ["|".join(re.escape(as_text(needle)) for needle in asked.evidence) for asked in (question, *later)]
    return row, [[found.span() for found in re.finditer(pattern, row["context"])] for pattern in patterns]


def _gold(name: str, question: Question) -> str:
    """The gold answer. For code it is the exact continuation, the space before it included."""
    gold = "".join(question.answer) if name == "complete" else as_text(question.answer).rstrip(".")
    return f"Paragraph {gold}" if name == "retrieve" else gold


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """One dataset, generated once and then read from the cache folder."""
    # the rows depend on this file, on Python's random numbers, and on their number
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    key = f"{code} python{sys.version_info.major}.{sys.version_info.minor} {ROWS}"
    name, turns = dataset.name, settings.turns or 1
    file = cache_folder() / "embedded" / f"{name}{f'-{turns}' if turns > 1 else ''}.jsonl"
    data = made_once(file, key, lambda: canonical([_row(name, index, turns) for index in range(ROWS)]))
    made: list[Any] = json.loads(data)
    lines, source = b"\n".join(canonical(row) for row, _ in made), f"embedded suite, {name}"
    loaded = load_lines(dataset, lines, source, TEMPLATES[name], MAX_NEW_TOKENS[name], settings.on_error)
    examples = []
    for example, (_, spans) in zip(loaded.examples, made, strict=True):
        first, *others = (tuple((start, stop) for start, stop in ranges) for ranges in spans)
        later = tuple(replace(turn, evidence=ranges) for turn, ranges in zip(example.turns, others, strict=True))
        examples.append(replace(example, evidence=first, turns=later))
    return replace(loaded, examples=tuple(examples))


def check(dataset: Dataset, settings: DataSettings) -> None:
    """Refuse more questions than the shortest contexts hold. Raises UserError."""
    if (settings.turns or 1) > MAX_TURNS:
        raise UserError(f"turns={settings.turns}: a row of the embedded suite has up to {MAX_TURNS} questions")


def missing(dataset: Dataset, settings: DataSettings) -> str | None:
    """Why a dataset has no rows of several turns; None if it has."""
    if dataset.name == "digest" and (settings.turns or 1) > 1:
        return "a context has one question only, so there are no rows with later turns"
    return None


_dataset = partial(Dataset, suite="embedded", chat_wrap=False)

SUITE = Suite(
    name="embedded",
    datasets=(
        _dataset("lookup", "single_doc_qa", "f1"),
        _dataset("hops", "multi_doc_qa", "f1"),
        _dataset("digest", "summarization", "rouge"),
        # protected: "Example", a sentence with its key, then the class and a full stop
        _dataset("shots", "few_shot", "classification", first_line=True, protected=r"^Example| \S+$"),
        _dataset("retrieve", "synthetic", "retrieval"),
        _dataset("complete", "code", "code_similarity"),
    ),
    load=load,
    models=("tiny",),
    rows_here=True,
    limit=12,  # enough for a first look
    check=check,
    missing=missing,
    reference_tokens=1024,  # the middle one of `LENGTHS`
)
