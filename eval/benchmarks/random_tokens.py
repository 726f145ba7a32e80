"""The random suite: prompts of random token ids, for time and memory. Answers have their full length, and no score.

Its text is the ids' numbers, so neither a tokenizer nor a file is needed: with `model.load_format=dummy` nothing is
downloaded. Times depend on shapes, not on values, but what LazyLLM revives depends on the weights: random weights
attend to all tokens alike, so it revives in nearly every step, which is its worst case.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from eval.benchmarks.rows import made_here
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite, register, setting
from lazyllm.errors import require
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class RandomConfig:
    length: list[int] = setting([1000, 3500], "tokens of a prompt; targets are solved for the longest")
    new_tokens: int = setting(17, "tokens of an answer")
    repeats: int = setting(3, "rows for each length, with different tokens")
    seed: int = setting(0, "of the tokens")


def check(dataset: Dataset, settings: DataSettings) -> None:
    """Refuse settings that allow no rows. Raises UserError."""
    options = settings.options
    fits = options.length and len({*options.length}) == len(options.length) and min(options.length) >= 1
    require(bool(fits), "random.length", options.length, "a list of different numbers from 1 on")
    for key in ("new_tokens", "repeats"):
        require(getattr(options, key) >= 1, f"random.{key}", getattr(options, key), "1 or more")


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The first rows, drawn from the model's whole vocabulary."""
    assert settings.model is not None
    options, vocabulary = settings.options, _vocabulary(settings.model)

    def example(repeat: int, length: int) -> Example:
        identity = f"random-{length}-{options.seed}-{repeat:02d}"
        rng = random.Random(identity)
        text = " ".join(str(rng.randrange(vocabulary)) for _ in range(length))
        return Example(dataset.name, identity, "", text, ("",), length=length, groups=(f"length={length}",))

    places = islice(product(range(options.repeats), options.length), settings.limit)
    total = options.repeats * len(options.length)
    made_of = [options.length, options.seed, vocabulary]
    rows = (example(*place) for place in places)
    return made_here(dataset, rows, options.new_tokens, made_of, f"random tokens, seed {options.seed}", total)


def tokenizer(model: ModelSpec) -> PreTrainedTokenizerBase:
    """A tokenizer whose tokens are their ids' numbers, with spaces between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers: Any = Tokenizer(models.WordLevel({str(number): number for number in range(_vocabulary(model))}, "0"))
    numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=numbers)


def _vocabulary(model: ModelSpec) -> int:
    """Tokens that the model knows."""
    from lazyllm.models.load import shape_of

    return shape_of(model).vocab_size


_ONLY = Dataset("random", "random", metric="", suite="random", chat_wrap=False, truncate=False, full_length=True)
SUITE = register(
    Suite(
        name="random",
        datasets=(_ONLY,),
        load=load,
        options=RandomConfig,
        check=check,
        tokenizer=tokenizer,
    )
)
