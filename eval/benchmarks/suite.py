"""The values of a suite of tasks, and the register of all suites.

A suite is a module of this package that registers a `Suite`; it is found by its file, and no other
code names it. Differences between suites are fields here, never an `if`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from eval.benchmarks.chat_format import CHAT_FORMATS, ChatFormat
from eval.settings import Settings
from lazyllm.spec import ModelSpec

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Dataset:
    """One dataset of a suite.

    name: its name in configs, files and tables; unique among all suites.
    task: the task whose score is the mean over its datasets.
    metric: the name of its score, a key of `eval.benchmarks.metrics.METRICS`; "" for no score.
    chat_wrap: whether the prompt is wrapped in the model's chat template.
    truncate: whether a prompt longer than `model.max_prompt_tokens` loses its middle.
    decode_halves: whether the two ends of such a prompt are decoded one by one, as LongBench does,
        or together.
    first_line: whether only the first line of the answer is scored (leading newlines stripped
        first).
    newline_ends: whether a newline token ends the answer, which then has at least one token.
    full_length: whether no token ends the answer.
    protected: a pattern (re.MULTILINE) of text in a few-shot context that no method may shorten:
        the examples' answers, and the labels that lay the examples out; "" if the context holds no
        examples.
    prompt_tokens: the prompt length for which a target speedup is solved; None for the paper's
        lengths, 0 if unknown.
    """

    name: str
    task: str
    metric: str
    suite: str
    chat_wrap: bool = True
    truncate: bool = True
    decode_halves: bool = True
    first_line: bool = False
    newline_ends: bool = False
    full_length: bool = False
    protected: str = ""
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Example:
    """One row. Its prompt is instruction, context and input, one after the other.

    id: the row's own, or a hash of the row if it has none; unique in its dataset.
    answers: the gold answers, at least one.
    all_classes: the class names; empty unless the dataset is a classification.
    length: the row's length in the suite's unit: words, characters or tokens.
    answer_prefix: the text after the chat template that the answer continues; a part of the prompt.
    groups: its groups of rows, for which scores are shown, such as "length=8k+".
    official: the row in the suite's official format.
    """

    dataset: str
    id: str
    input: str
    context: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] = ()
    length: int = 0
    instruction: str = ""
    answer_prefix: str = ""
    groups: tuple[str, ...] = ()
    official: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Published:
    """The published size of a dataset, for plans before its rows are here."""

    examples: int
    words: int  # mean of an example
    max_new_tokens: int
    tokens_per_word: float  # by Llama 2's tokenizer


@dataclass(frozen=True)
class LoadedDataset:
    """A dataset's rows, and what its prompts and answers need.

    max_new_tokens: the maximum number of tokens of an answer.
    data_sha256: of the rows' bytes, one JSON object a line; if only the first rows are made, of
        their source.
    config_sha256: of the official prompts and max_new_tokens.
    source: the origin of the rows, as shown.
    skipped: (place, reason) of rows left out, with `on_error="skip"` only.
    total: the number of the dataset's rows if `examples` holds only the first; None if it holds
        all.
    """

    dataset: Dataset
    examples: tuple[Example, ...]
    max_new_tokens: int
    data_sha256: str
    config_sha256: str
    source: str
    skipped: tuple[tuple[str, str], ...] = ()
    total: int | None = None

    def with_examples(self, examples: Sequence[Example]) -> "LoadedDataset":
        """The dataset with some of its examples; `total` stays the number of all."""
        total = self.total or len(self.examples)
        return replace(self, examples=tuple(examples), total=total)


@dataclass(frozen=True)
class DataSettings:
    """The settings of a run that determine its rows.

    dir: the folder with the suite's files (`data.dir`); None downloads or makes them.
    on_error: "raise" if a row is unusable, or "skip" such rows and list them in `LoadedDataset`.
    limit: the number of rows; a suite that makes rows makes no more; None for all.
    options: the suite's own settings, of the type `Suite.options`; None if it has none.
    model: names the tokenizer, for suites whose rows depend on it.
    chat: the format of prompts.
    subset: the suite's own subset of rows (`Suite.subsets`); None for all rows.
    """

    dir: Path | None = None
    on_error: OnError = "raise"
    limit: int | None = None
    options: Any = field(default=None, hash=False)  # its lists have no hash
    model: ModelSpec | None = None
    chat: ChatFormat = CHAT_FORMATS["none"]
    subset: str | None = None


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite of datasets and their source.

    name: its name in records and tables.
    datasets: in the order of tables.
    load: reads one of its datasets. Raises UserError.
    check: before torch is imported, why a dataset's rows cannot be loaded, or None. Such a dataset
        is refused if named, else left out.
    options: its settings, each with a default, in a config under the suite's name; None for none.
    lengths: the one of them that lists the tokens of a prompt and its answer together; "" for none.
    models: presets made for this suite, whose default it is.
    limit: the number of examples of each dataset in a run without a `limit`; None for all.
    subsets: values of `subset` in configs that name rows of this suite, for its `load` to choose.
    published: by the name of the dataset, the sizes that LazyLLM's paper reports; None for a suite
        that is not in the paper.
    cached: whether all its files are in the caches; None for a suite that has or makes its rows.
    tokenizer: makes the tokenizer of its prompts, which then measure time only; None takes the
        model's.
    """

    name: str
    datasets: tuple[Dataset, ...]
    load: Callable[[Dataset, DataSettings], LoadedDataset]
    check: Callable[[Dataset, DataSettings], str | None] = lambda dataset, settings: None
    options: type[Settings] | None = None
    lengths: str = ""
    models: tuple[str, ...] = ()
    limit: int | None = None
    subsets: tuple[str, ...] = ()
    published: Callable[[DataSettings], Mapping[str, Published]] | None = None
    cached: Callable[[DataSettings], bool] | None = None
    tokenizer: Callable[[ModelSpec], Any] | None = None

    @property
    def whole(self) -> str:
        """The name in configs for all its datasets."""
        return "all" if self.published else self.name

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """The tasks of its datasets, in the order of tables."""
        return tuple(dict.fromkeys(dataset.task for dataset in self.datasets))

    def length(self, settings: DataSettings) -> int | None:
        """Return the most tokens of prompt and answer; None if they depend on the rows."""
        return max(getattr(settings.options, self.lengths)) if self.lengths else None

    @property
    def too_long_hint(self) -> str:
        """Advice if a prompt is longer than the model's positions."""
        return f"lower {self.name}.{self.lengths}" if self.lengths else "choose shorter rows"


SUITES: dict[str, Suite] = {}
DATASETS: dict[str, Dataset] = {}


def register(suite: Suite) -> Suite:
    """Make a suite and its datasets known. Of two with one name, the later one counts."""
    SUITES[suite.name] = suite
    DATASETS.update({dataset.name: dataset for dataset in suite.datasets})
    return suite
