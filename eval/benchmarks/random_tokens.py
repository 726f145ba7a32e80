"""The random suite: prompts of random token ids, for time and memory. Answers have their full length, and no score.

Its text is the ids' numbers, so neither a tokenizer nor a file is needed: with `model.load_format=dummy` nothing is
downloaded. Times depend on shapes, not on values, but what LazyLLM revives depends on the weights: random weights
attend to all tokens alike, so it revives in nearly every step, which is its worst case.
"""

from __future__ import annotations

import random
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from eval.benchmarks.rows import made_here
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite, register
from eval.settings import Positive, Settings, check_different
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RandomSettings(Settings):
    """How many tokens."""

    length: list[Positive] = Field(default=[1000, 3500], description="tokens of a prompt; speedups are solved for the longest")
    new_tokens: Positive = Field(default=17, description="tokens of an answer")
    repeats: Positive = Field(default=3, description="rows for each length, with different tokens")
    seed: int = Field(default=0, description="of the tokens")

    @field_validator("length")
    @classmethod
    def _differ(cls, values: list[int]) -> list[int]:
        return check_different(values)


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
    from lazyllm.models.config import shape_of

    return shape_of(model).vocab_size


_ONLY = Dataset("random", "random", metric="", suite="random", chat_wrap=False, truncate=False, full_length=True)
SUITE = register(
    Suite(
        name="random",
        datasets=(_ONLY,),
        load=load,
        options=RandomSettings,
        tokenizer=tokenizer,
    )
)
