"""Needle in a haystack: a question about one fact in a long text, for every length and depth.

The test is Greg Kamradt's (github.com/gkamradt/LLMTest_NeedleInAHaystack). Ours: as in RULER, the
fact is a number that no model can guess, and an answer is right if it contains the number. A needle
stands at the first end of a sentence at or after its depth; Kamradt's places it at the previous
sentence end. A length counts all of the prompt and the answer, his the text and 200 tokens for the
rest. The haystack is RULER's noise or the user's text, repeated if necessary.
"""

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count, cycle, islice, product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from eval.benchmarks.chat_format import ChatFormat
from eval.benchmarks.prompts import build_prompt, continuation_ids, tokenizer_for_rows
from eval.benchmarks.rows import made_here, sha256_of
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite, register
from eval.settings import Count, Positive, Settings, Text, check_different
from lazyllm.errors import UserError, reason_of

VERSION = 1

MAX_NEW_TOKENS = 32
# Both are RULER's
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic numbers for {key} is: {value}."
_INSTRUCTION = """\
Somewhere in this text a special magic number is given. Find it and remember it.

"""
_QUESTION = "\n\nWhich special magic number does the text give for {key}?"
_ANSWER_PREFIX = " The special magic number for {key} that the text gives is"
# Two of these are the key of a number
_KEYS = """
    amber anchor apple arrow autumn badge bamboo banner barrel basket beacon beaver bishop
    blanket blossom bottle bridge bronze bucket button cabin cactus camel candle canoe canyon
    carbon carpet castle cedar cello chalk chapel cherry chimney cinder circle clover cobalt
    coffee comet copper coral cotton cousin cradle crater cricket crimson crystal curtain
    cypress dagger daisy desert diamond dolphin donkey dragon drawer eagle ember emerald engine
    envelope falcon feather fennel ferry fiddle flannel flint flute forest fossil fountain
    galaxy garlic garnet geyser ginger glacier goblet granite grape gravel guitar hammer harbor
    harvest hazel helmet heron hollow honey horizon hornet icicle indigo insect island ivory
    jacket jaguar jasmine jelly jewel jungle juniper kernel kettle kitten ladder lagoon lantern
    lattice laurel lemon lentil leopard library lilac linen lizard lobster locket lotus lumber
    magnet mango maple marble mantle meadow medal melon mirror monsoon mortar mosaic muffin
    mustard nectar needle nickel nutmeg oasis ocean olive onion opal orange orchard orchid otter
    oyster paddle palace panther papaya parcel parrot pasture pebble pelican pepper piano pigeon
    pillow pioneer planet plaza plum pocket pollen pony poplar poppy portal potato prairie prism
    pumpkin puppet puzzle python quarry quartz quilt rabbit raccoon radish raven reef ribbon
    ridge rocket rooster rosemary ruby saddle saffron salmon sapphire satin saturn scarlet
    shadow shelter signal silver socket sparrow spider spinach spiral spruce stable statue
    summit sunset swallow syrup tablet tango teapot temple thicket thistle thunder ticket timber
    tobacco tomato topaz torch tractor trumpet tulip tunnel turban turtle umber valley vanilla
    velvet vessel violet violin volcano wagon walnut walrus whistle willow window winter wizard
    yarrow yogurt zebra zenith zephyr zinc
""".split()  # noqa: SIM905

_SENTENCE_END = re.compile(r"(?<=[.!?]) ")
_WORDS = 40  # longest part of a user's text, in words; needles stand between parts


class NeedleSettings(Settings):
    """Which needles lie where."""

    lengths: list[Positive] = Field(
        default=[512, 1024, 2048],
        description="maximum tokens of a prompt, its chat template and its answer together",
    )
    depths: list[Annotated[Count, Field(le=100)]] = Field(
        default=list(range(0, 101, 10)),
        description="per cent of the text before the needle, both without other needles",
    )
    others: Annotated[Count, Field(le=100)] = Field(
        default=0,
        description="needles with other keys: only the question tells which one is asked for",
    )
    repeats: Positive = Field(
        default=1,
        description="rows for each length and depth, with different needles",
    )
    seed: int = Field(default=42, description="of the needles")
    haystack: Text | None = Field(
        default=None,
        description="the text: a file, or a folder of `.txt` and `.md` files; `null`: noise",
    )

    @field_validator("lengths", "depths")
    @classmethod
    def _differ(cls, values: list[int]) -> list[int]:
        return check_different(values)

    @field_validator("haystack")
    @classmethod
    def _exists(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).expanduser().exists():
            raise ValueError("a text file or a folder, but it does not exist")
        return value


@dataclass(frozen=True)
class _Row:
    """A row without its haystack. others: (share of the text before it, sentence) of each."""

    identity: str
    length: int
    depth: int
    key: str
    value: str
    needle: str
    others: tuple[tuple[float, str], ...]

    def example(self, sentences: Sequence[str], place: int) -> Example:
        """Make the example whose needle stands after so many of these sentences."""
        needles = [(share * len(sentences), text) for share, text in self.others]
        parts = list(sentences)
        for at, text in sorted([*needles, (place, self.needle)], reverse=True):
            parts.insert(int(at), text)
        context = " ".join(parts)
        question = _QUESTION.format(key=self.key)
        answer_prefix = _ANSWER_PREFIX.format(key=self.key)
        return Example(
            dataset="needle",
            id=self.identity,
            instruction=_INSTRUCTION,
            context=context,
            input=question,
            answers=(self.value,),
            length=self.length,
            answer_prefix=answer_prefix,
            groups=(f"length={self.length}", f"depth={self.depth}"),
            official={  # in RULER's format, with length and depth
                "id": self.identity,
                "input": _INSTRUCTION + context + question,
                "outputs": [self.value],
                "answer_prefix": answer_prefix,
                "length": self.length,
                "depth": self.depth,
            },
        )


def _draw(length: int, depth: int, seed: int, repeat: int, others: int) -> _Row:
    identity = f"needle-{length}-{depth}-{seed}-{repeat:02d}"
    rng = random.Random(identity)
    key, value, needle = _draw_needle(rng, ())
    taken, found = {key}, list[tuple[float, str]]()
    for _ in range(others):
        other, _, text = _draw_needle(rng, taken)
        taken.add(other)
        found.append((rng.random(), text))
    return _Row(identity, length, depth, key, value, needle, tuple(found))


def _draw_needle(rng: random.Random, taken: Collection[str]) -> tuple[str, str, str]:
    """A key that is not taken, its number, and the sentence that tells it."""
    keys = ("-".join(rng.sample(_KEYS, 2)) for _ in count())
    key = next(key for key in keys if key not in taken)
    value = str(rng.randint(1_000_000, 9_999_999))
    return key, value, _NEEDLE.format(key=key, value=value)


class _Maker:
    """Makes examples for one tokenizer and haystack."""

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Any,
        chat: ChatFormat,
        haystack: Sequence[str],
    ) -> None:
        self.dataset, self.tokenizer, self.chat = dataset, tokenizer, chat
        self.haystack = haystack
        # a sentence's tokens are counted once, as it follows other text
        self.size = cache(lambda sentence: len(continuation_ids(tokenizer, f" {sentence}")))

    def tokens(self, example: Example) -> int:
        """Count the tokens of an example's prompt."""
        return len(build_prompt(example, self.dataset, self.tokenizer, chat=self.chat).token_ids)

    def example(self, row: _Row) -> Example:
        """Make the longest prompt of whole sentences that fits. Raises UserError if none fits."""
        limit = row.length - MAX_NEW_TOKENS
        room = limit - self.tokens(row.example([], 0))
        if room < 0:
            raise UserError(
                f"needle.lengths: {row.length} is too short: needle, question and answer alone "
                f"take {row.length - room} tokens"
            )
        sentences, ends = list[str](), [0]  # the tokens before each sentence, and those of all
        for sentence in cycle(self.haystack):
            end = ends[-1] + self.size(sentence)
            if end > room:
                break
            sentences.append(sentence)
            ends.append(end)
        while True:
            place = bisect_left(ends, row.depth / 100 * ends[-1])
            example = row.example(sentences, place)
            if (tokens := self.tokens(example)) <= limit:
                return example
            fitting = bisect_right(ends, ends[-1] - (tokens - limit)) - 1
            sentences, ends = sentences[:fitting], ends[: fitting + 1]


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """Make the first rows. `data_sha256` covers all that rows are made from, not their number.

    Raises UserError for an unreadable text, or a length that is too short for needle, question and
    answer.
    """
    options: NeedleSettings = settings.options
    text = None if options.haystack is None else _sentences(Path(options.haystack).expanduser())
    tokenizer = tokenizer_for_rows(settings.model, "needle")
    haystack = text or _SENTENCE_END.split(_NOISE)
    maker = _Maker(dataset, tokenizer, settings.chat, haystack)
    places = product(range(options.repeats), options.lengths, options.depths)
    examples = tuple(
        maker.example(_draw(length, depth, options.seed, repeat, options.others))
        for repeat, length, depth in islice(places, settings.limit)
    )
    made_of = [
        VERSION,
        options.lengths,
        options.depths,
        options.others,
        options.seed,
        repr(settings.chat),
        None if text is None else sha256_of(text),
        examples[0].official,
    ]
    total = options.repeats * len(options.lengths) * len(options.depths)
    source = f"needles, seed {options.seed}"
    return made_here(dataset, examples, MAX_NEW_TOKENS, made_of, source, total)


@lru_cache(maxsize=1)
def _sentences(path: Path) -> list[str]:
    """The sentences of a user's text; long ones are cut into parts."""
    sentences = _SENTENCE_END.split(re.sub(r"\s+", " ", _read_text(path)))
    parts = []
    for words in (sentence.split(" ") for sentence in sentences):
        parts += [" ".join(words[at : at + _WORDS]) for at in range(0, len(words), _WORDS)]
    return parts


def _read_text(path: Path) -> str:
    """The text of a file, or of a folder's .txt and .md files. Raises UserError if it has none."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md"))
    try:
        text = " ".join(file.read_text("utf-8") for file in files).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"needle.haystack={path}: cannot be read ({reason_of(error)})") from error
    if not text:
        instead = "give needle.haystack=FILE or FOLDER of .txt or .md files"
        raise UserError(f"{path}: no text to hide needles in; {instead}")
    return text


_ONLY = Dataset("needle", "needle", "string_match_all", suite="needle", truncate=False)
SUITE = register(
    Suite(
        name="needle",
        datasets=(_ONLY,),
        load=load,
        options=NeedleSettings,
        lengths="lengths",
    )
)
