"""Needle in a haystack: a question about one fact in a long text, for every length and depth.

The test is Greg Kamradt's (github.com/gkamradt/LLMTest_NeedleInAHaystack). Ours: as in RULER, the fact is a number that
no model can guess, and an answer is right if it contains the number. A needle stands at the first end of a sentence at
or behind its depth, his at the last one before it. A length counts all of the prompt and the answer, his the text and
200 tokens for the rest. The haystack is RULER's noise or the user's text, repeated if necessary.
"""

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
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
_INSTRUCTION = "Somewhere in this text a special magic number is given. Find it and remember it.\n\n"
_QUESTION = "\n\nWhich special magic number does the text give for {key}?"
_ANSWER_PREFIX = " The special magic number for {key} that the text gives is"
# Two of these are the key of a number
_KEYS = """
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
        default=0, description="other needles in the text, with other keys: only the question tells which one is asked for"
    )
    repeats: Positive = Field(default=1, description="rows for each length and depth, with different needles")
    seed: int = Field(default=42, description="of the needles")
    haystack: Text | None = Field(
        default=None, description="the text around needles: a text file, or a folder of `.txt` and `.md` files; `null`: noise"
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


class _Maker:
    """Makes rows for one tokenizer and haystack."""

    def __init__(self, tokenizer: Any, chat: ChatFormat, haystack: Sequence[str], others: int) -> None:
        self.tokenizer, self.chat, self.haystack, self.others = tokenizer, chat, haystack, others
        # a sentence's tokens are counted once, as it follows other text
        self._size = cache(lambda sentence: len(continuation_ids(tokenizer, f" {sentence}")))

    def example(self, dataset: Dataset, seed: int, length: int, depth: int, repeat: int) -> Example:
        """The longest prompt of whole sentences that fits. Raises UserError if none fits."""
        identity = f"needle-{length}-{depth}-{seed}-{repeat:02d}"
        rng = random.Random(identity)
        key, value, needle = _needle(rng, ())
        taken, others = {key}, list[tuple[float, str]]()
        for _ in range(self.others):
            other, _, text = _needle(rng, taken)
            taken.add(other)
            others.append((rng.random(), text))
        question, answer_prefix = (text.format(key=key) for text in (_QUESTION, _ANSWER_PREFIX))

        def made(sentences: Sequence[str], place: int) -> tuple[Example, int]:
            """A prompt with the needle after so many sentences, and its tokens."""
            placed = [*((share * len(sentences), text) for share, text in others), (place, needle)]
            parts = list(sentences)
            for at, text in sorted(placed, reverse=True):
                parts.insert(int(at), text)
            context = " ".join(parts)
            example = Example(
                dataset=dataset.name,
                id=identity,
                instruction=_INSTRUCTION,
                context=context,
                input=question,
                answers=(value,),
                length=length,
                answer_prefix=answer_prefix,
                groups=(f"length={length}", f"depth={depth}"),
                official={  # in RULER's format, with length and depth
                    "id": identity,
                    "input": _INSTRUCTION + context + question,
                    "outputs": [value],
                    "answer_prefix": answer_prefix,
                    "length": length,
                    "depth": depth,
                },
            )
            return example, len(build_prompt(example, dataset, self.tokenizer, chat=self.chat).token_ids)

        limit = length - MAX_NEW_TOKENS
        room = limit - made([], 0)[1]
        if room < 0:
            raise UserError(
                f"needle.lengths: {length} is too short: needle, question and answer alone take {length - room} tokens"
            )
        sentences, ends = list[str](), [0]  # the tokens before each sentence, and those of all
        for sentence in cycle(self.haystack):
            end = ends[-1] + self._size(sentence)
            if end > room:
                break
            sentences.append(sentence)
            ends.append(end)
        while True:
            example, tokens = made(sentences, bisect_left(ends, depth / 100 * ends[-1]))
            if tokens <= limit:
                return example
            fitting = bisect_right(ends, ends[-1] - (tokens - limit)) - 1
            sentences, ends = sentences[:fitting], ends[: fitting + 1]


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The first rows. `data_sha256` covers all that rows are made from, and is independent of their number.

    Raises UserError for an unreadable text, or a length that is too short for needle, question and answer.
    """
    options = settings.options
    own = _sentences(Path(options.haystack).expanduser()) if options.haystack is not None else None
    haystack = own or _SENTENCE_END.split(_NOISE)
    maker = _Maker(tokenizer_for_rows(settings.model, "needle"), settings.chat, haystack, options.others)
    places = islice(product(range(options.repeats), options.lengths, options.depths), settings.limit)
    examples = tuple(maker.example(dataset, options.seed, length, depth, repeat) for repeat, length, depth in places)
    text = sha256_of(own) if own is not None else None
    hashed = [
        VERSION,
        options.lengths,
        options.depths,
        options.others,
        options.seed,
        repr(settings.chat),
        text,
        examples[0].official,
    ]
    total = options.repeats * len(options.lengths) * len(options.depths)
    return made_here(dataset, examples, MAX_NEW_TOKENS, hashed, f"needles, seed {options.seed}", total)


def _needle(rng: random.Random, taken: Collection[str]) -> tuple[str, str, str]:
    """A key that is not taken, its number, and the sentence that tells it."""
    key = next(key for _ in count() if (key := "-".join(rng.sample(_KEYS, 2))) not in taken)
    value = str(rng.randint(1_000_000, 9_999_999))
    return key, value, _NEEDLE.format(key=key, value=value)


SUITE = register(
    Suite(
        name="needle",
        datasets=(Dataset("needle", "needle", "string_match_all", suite="needle", truncate=False),),
        load=load,
        options=NeedleSettings,
    )
)


@lru_cache(maxsize=1)
def _sentences(path: Path) -> list[str]:
    """The sentences of a user's text; long ones are cut into parts."""
    sentences = _SENTENCE_END.split(re.sub(r"\s+", " ", _read_text(path)))
    parts = []
    for words in (sentence.split(" ") for sentence in sentences):
        parts += [" ".join(words[start : start + _WORDS]) for start in range(0, len(words), _WORDS)]
    return parts


def _read_text(path: Path) -> str:
    """The text of a file, or of a folder's .txt and .md files. Raises UserError if there is none."""
    files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md")) if path.is_dir() else [path]
    try:
        text = " ".join(file.read_text("utf-8") for file in files).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"needle.haystack={path}: cannot be read ({reason_of(error)})") from error
    if not text:
        raise UserError(f"{path}: no text to hide needles in; give needle.haystack=FILE or FOLDER of .txt or .md files")
    return text
