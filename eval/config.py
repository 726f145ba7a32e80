"""One pydantic model holds a run's settings. Hydra composes it, and `--help` is made from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
    model_validator,
)

from eval.benchmarks import SUITES
from eval.benchmarks.subsets import SUBSETS
from eval.settings import Count, PathText, Positive, Settings, Text, first_fault, short
from lazyllm.errors import UserError, nearest
from lazyllm.models.chat_template import TODAY
from lazyllm.spec import ATTENTION, AUTO, DTYPES, SDPA_BACKENDS

_OWN_SUBSETS = tuple(name for suite in SUITES.values() for name in suite.subsets)
_SUITE_SETTINGS = {suite.name: suite.options for suite in SUITES.values() if suite.options}
if TYPE_CHECKING:
    Dtype = Attention = SdpaBackend = Subset = str
else:  # a type checker does not evaluate these
    Dtype = Literal[AUTO, *DTYPES]
    Attention = Literal[ATTENTION]
    SdpaBackend = Literal[SDPA_BACKENDS]
    Subset = Literal[*SUBSETS, *_OWN_SUBSETS]


def read_speedup(value: Any) -> float | str:
    """Read a speedup as a number: 2, "2x" or "2.0x"; "table1", for the paper's, stays.

    Raises ValueError.
    """
    number = value.removesuffix("x") if isinstance(value, str) else value
    try:
        speedup = value if value == "table1" else float(number)
    except (TypeError, ValueError):
        speedup = None
    is_number = isinstance(speedup, float) and 1 <= speedup < float("inf")
    if speedup is None or isinstance(value, bool) or not (is_number or speedup == "table1"):
        raise ValueError("a speedup of 1 or more, such as 2x, or table1")
    return speedup


def _read_speedups(value: Any) -> Any:
    if isinstance(value, list):
        return [read_speedup(item) for item in value]
    return None if value is None else read_speedup(value)


Speedup = Annotated[float | str, PlainValidator(read_speedup)]
"""A method is solved for this ideal TTFT speedup; "table1" is the paper's, by task and model."""


class ModelSettings(Settings):
    """These settings choose the model and the format of its prompts (`ModelSpec`, `ChatFormat`)."""

    name: Text = Field(description="a preset, a folder, a GGUF file or a hub id")
    gguf: Text | None = Field(
        default=None, description="a GGUF file in the folder or repository that `model` names"
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="`dummy` builds random weights and downloads nothing, for timing",
    )
    dtype: Dtype = Field(
        default=AUTO,
        description="`bfloat16`, `float16`, `float32`, `float64`; `auto`: the checkpoint's on a "
        "GPU; on a CPU `float32`, or `bfloat16` where it is measured to be faster",
    )
    device: Text = Field(
        default=AUTO,
        description="`cpu`, `cuda`, `cuda:1`, ...; `auto` takes an accelerator if there is one",
    )
    revision: Text | None = Field(
        default=None, description="branch, tag or commit of a hub id; `null`: the newest"
    )
    tokenizer: Text | None = Field(
        default=None, description="folder or hub id of another tokenizer; `null`: the model's"
    )
    attn_implementation: Attention = Field(
        default="sdpa",
        description="`sdpa`, `eager`, `flash_attention_2`",
    )
    sdpa_backend: SdpaBackend = Field(
        default=AUTO,
        description="of `sdpa` on a GPU: `flash`, `cudnn` (prefill only), `efficient`, `math`; "
        "`auto`: the card's fastest",
    )
    max_prompt_tokens: Positive | None = Field(
        default=None,
        description="longer prompts lose their middle, as in LongBench; `null`: LongBench's share "
        "of the model's positions",
    )
    chat: Text | None = Field(
        default=None,
        description="`llama2`, `xgen`, `auto` (the tokenizer's template), `none`; `null`: `auto` "
        "if there is a template",
    )
    chat_args: dict[str, Any] | None = Field(
        default=None, description="arguments of the template, such as `{enable_thinking: true}`"
    )
    system: Text | None = Field(default=None, description="a system message before the prompt")
    today: Text = Field(
        default=TODAY, description="the date, for templates that write one into the prompt"
    )
    thinking_tokens: Count = Field(
        default=0, description="extra tokens for thinking; the text after `</think>` is scored"
    )
    paper: Literal["llama2", "xgen"] | None = Field(
        default=None,
        description="the column of the paper's tables to compare with: `llama2`, `xgen`",
    )


class DataConfig(Settings):
    """These settings choose files of rows."""

    dir: PathText | None = Field(
        default=None,
        description="folder with LongBench's `<dataset>.jsonl` and `config/*.json`, LongBench "
        "v2's `data.json` and `prompts/0shot.txt`, or RULER's `LENGTH/TASK.jsonl`; `null` fetches "
        "them once",
    )
    length: Positive = Field(
        default=4096,
        description="length of RULER's rows in tokens; published are 4096, 8192 and 16384",
    )
    on_error: Literal["raise", "skip"] = Field(
        default="raise", description="`skip` leaves out invalid rows and reports their number"
    )


class TrackerSettings(Settings):
    """These settings are for Weights & Biases; its environment variables hold the others.

    Examples are WANDB_ENTITY and WANDB_TAGS.
    """

    name: Literal["none", "wandb"] = Field(default="none", description="`wandb` logs to W&B")
    project: Text = Field(default="lazyllm-bench", description="the project in W&B")
    mode: Literal["online", "offline", "disabled"] = Field(
        default="offline",
        description="`offline` writes to `<run folder>/wandb`; `online` needs a key",
    )


class ArmSettings(Settings):
    """An arm is a method with its hyperparameters.

    These are extra keys, which the method's class checks (`eval.arms`).
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: Text
    label: Text | None = Field(default=None, description="the arm's name in tables of its run")
    speedup: Annotated[Any, PlainValidator(_read_speedups)] = Field(
        default=None,
        description="the ideal TTFT speedup that a hyperparameter is solved for; `table1`: the "
        "paper's",
    )
    seeds: Positive | None = Field(
        default=None, description="makes an arm for each of so many seeds"
    )


class CommonSettings(Settings):
    """These are all settings of a run except those of suites."""

    model: ModelSettings
    method: dict[str, Any] | None = None
    arms: list[ArmSettings] = Field(
        default=[],
        min_length=1,
        description="several methods: `arms=[lazy,fastkv]`, or `arms=[{name: lazy, speedup: 2x}, "
        "...]`; a list of values, or `seeds: 5`, makes an arm of each",
    )
    speedup: Speedup | None = Field(
        default=None,
        description="the ideal TTFT speedup that each arm is solved for, such as `2x`, unless it "
        "gives its own",
    )
    baseline: bool = Field(
        default=True,
        description="also measures the model without a method on every example, as an arm",
    )
    dataset: list[Text] = Field(
        default=[],
        description="datasets, a task or a suite: `dataset=hotpotqa`, `dataset=[vt,cwe]`, "
        "`dataset=all`; or a YAML file that describes your own rows",
    )
    data: DataConfig = DataConfig()
    limit: Positive | None = Field(
        default=None,
        description="takes N examples of each dataset; `null`: all (embedded: 12)",
    )
    subset: Subset = Field(
        default="first",
        description="which N examples: `first`, `random` (by `seed`), `by_length` (spread over the "
        "dataset's lengths), or `mini` (of the 187 rows of LongBench that MiniLongBench chose)",
    )
    max_new_tokens: Positive | None = Field(
        default=None,
        description="makes answers shorter than the dataset allows, for a quick look",
    )
    batch_size: Positive | None = Field(
        default=None,
        description="how many answers decode together; each TTFT is measured alone; 1 also times "
        "every step; `null`: as many as fit into a GPU's memory, up to 8, and 1 on a CPU",
    )
    warmup: Count = Field(
        default=5, description="warm-up runs of each arm before the first example"
    )
    seed: Annotated[Count, Field(lt=2**63)] = Field(
        default=0,
        description="seed of random weights and of random subsets, and the default of methods that "
        "have a `seed`",
    )
    threads: Annotated[Positive, Field(le=1024)] | None = Field(
        default=None, description="CPU threads, up to 1024; `null`: torch's choice (`tiny`: 1)"
    )
    out: PathText | None = Field(
        default=None,
        description="the run's folder; `null`: `runs/<model>-<method or "
        "label>-<data>-<fingerprint>`",
    )
    trace: Count = Field(
        default=0,
        description="stores each layer's importance and selection for the first N examples of each "
        "dataset",
    )
    fidelity: Literal["answer"] | None = Field(
        default=None,
        description="`answer` also feeds the baseline's answer and the gold one to every arm, "
        "without timing it",
    )
    label: Text | None = Field(
        default=None, description="the comparison's name, in titles and folders"
    )
    tracker: TrackerSettings = TrackerSettings()

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        """Make `arms` a list of mappings, of `method` if there are none, and `dataset` a list."""
        method, arms, dataset = (values.get(key) for key in ("method", "arms", "dataset"))
        if method and arms:
            raise ValueError(_refuse_both(method.get("name"), arms))
        arms = [method or "lazy"] if arms is None else [arms] if isinstance(arms, str) else arms
        if isinstance(arms, list):
            arms = [{"name": arm} if isinstance(arm, str) else arm for arm in arms]
        dataset = [dataset] if isinstance(dataset, str) else dataset or []
        return values | {"method": None, "arms": arms, "dataset": dataset}

    @model_validator(mode="after")
    def _agree(self) -> CommonSettings:
        if self.fidelity and not self.baseline:
            raise ValueError("fidelity=answer: expected baseline=true with it")
        if self.data.dir is not None and not Path(self.data.dir).is_dir():
            raise ValueError(f"data.dir={self.data.dir}: expected an existing folder")
        if self.tracker.mode == "online" and self.tracker.name != "wandb":
            raise ValueError("tracker.mode=online: expected tracker=wandb with it")
        return self


def _refuse_both(method: Any, arms: Any) -> str:
    """Say what to do about a method that is given together with arms, such as an experiment's."""
    names = [arm.get("name") if isinstance(arm, dict) else arm for arm in arms]
    given = f"method={method}: the arms are {', '.join(map(str, names))} already"
    if all(isinstance(arm, str) for arm in arms):
        return f"{given}: give arms=[{','.join([*arms, str(method)])}]"
    return f"{given}: leave it out, or give arms=[{method}], which takes their place"


if TYPE_CHECKING:
    SuiteSettings = CommonSettings
else:  # a field for each suite that has settings
    _FIELDS = {name: (kind, kind()) for name, kind in _SUITE_SETTINGS.items()}
    SuiteSettings = create_model("SuiteSettings", __base__=CommonSettings, **_FIELDS)


class RunConfig(SuiteSettings):
    """These are all settings of a run, with those of each suite under its name."""


Config = TypeVar("Config", bound=Settings)


def validated(values: Any, kind: type[Config]) -> Config:
    """Check nested dictionaries and return settings.

    Raises UserError with one line: key, value, what was expected.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        message = _one_line(error, kind)
        if values.get("method"):  # which the only arm was made of
            message = message.replace("arms.0.", "method.", 1)
        raise UserError(message) from None


def _one_line(error: ValidationError, kind: type[BaseModel]) -> str:
    """Describe the first fault as on the command line."""
    fault = first_fault(error)
    if not fault.place:  # a rule of several settings, which names them
        return fault.expected
    key = ".".join(map(str, fault.place))
    if fault.kind == "extra_forbidden":
        names = [name for name, *_ in documented(kind)]
        return f"{key}={fault.given}: no such setting: {nearest(key, names, '--help')}"
    optional = ", or null" if _takes_null(kind, fault.place) else ""
    return f"{key}={fault.given}: expected {fault.expected}{optional}"


def _takes_null(kind: type[BaseModel], where: Sequence[Any]) -> bool:
    """Say whether a setting may be null."""
    for part in where[:-1]:
        field: Any = kind.model_fields.get(part)
        if field is None or not isinstance(field.annotation, type):
            return False
        kind = field.annotation
    field = kind.model_fields.get(where[-1])
    return field is not None and field.default is None


def documented(kind: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str]]:
    """List (key, default, description) of every setting that has a description, in order.

    `GROUP=` sets a group's name.
    """
    rows = list[tuple[str, str, str]]()
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            rows += documented(field.annotation, f"{prefix}{name}.")
        elif field.description is not None:
            default = "" if field.is_required() else short(field.default)
            key = prefix.rstrip(".") if name == "name" else prefix + name
            rows.append((key, default, field.description))
    return rows
