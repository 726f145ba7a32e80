"""A run's settings: the schema, one `setting(default, text)` each, from which `--help` and the docs are made."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING as MISSING_VALUE

from eval.benchmarks.chat_format import TODAY
from eval.benchmarks.datasets import SuiteSettings
from eval.benchmarks.suite import setting
from lazyllm.errors import require


@dataclass
class ModelConfig:
    """The model, and the format of its prompts (`ModelSpec`, `ChatFormat`)."""

    name: str = setting(MISSING_VALUE, "a preset, a folder, a GGUF file or a hub id")
    gguf: str | None = setting(None, "a GGUF file in the folder or repository that `model.name` is")
    load_format: str = setting("auto", "`dummy` builds random weights and downloads nothing, for timing")
    dtype: str = setting(
        "auto",
        "`bfloat16`, `float16`, `float32`, `float64`; `auto`: the checkpoint's on a GPU; on a CPU `float32`, or "
        "`bfloat16` where it is measured to be faster",
    )
    device: str = setting("auto", "`cpu`, `cuda`, `cuda:1`, ...; `auto` takes an accelerator if there is one")
    revision: str | None = setting(None, "branch, tag or commit of a hub id; `null`: the newest")
    tokenizer: str | None = setting(None, "folder or hub id of another tokenizer; `null`: the model's")
    attn_implementation: str = setting("sdpa", "`sdpa`, `eager`, `flash_attention_2`")
    sdpa_backend: str = setting(
        "auto", "of `sdpa` on a GPU: `flash`, `cudnn` (prefill only), `efficient`, `math`; `auto`: the card's fastest"
    )
    max_prompt_tokens: int | None = setting(
        None, "longer prompts lose their middle, as in LongBench; `null`: LongBench's share of the model's positions"
    )
    chat: str | None = setting(
        "none", "`llama2`, `xgen`, `auto` (the tokenizer's template), `none`; `null`: `auto` if there is a template"
    )
    chat_args: Any = setting(None, "arguments of the template, such as `{enable_thinking: true}`")
    system: str | None = setting(None, "a system message before the prompt")
    today: str = setting(TODAY, "the date, for templates that write one into the prompt")
    thinking_tokens: int = setting(0, "extra tokens for thinking; the text after `</think>` is scored")
    paper: str | None = setting(None, "the column of the paper's tables to compare with: `llama2`, `xgen`")


@dataclass
class DataConfig:
    """Files of rows."""

    dir: str | None = setting(
        None,
        "folder with LongBench's `<dataset>.jsonl` and `config/*.json`, LongBench v2's `data.json` and "
        "`prompts/0shot.txt`, or RULER's `LENGTH/TASK.jsonl`; `null` fetches them once",
    )
    length: int = setting(4096, "of RULER's rows, in tokens: as published, 4096, 8192 or 16384")
    on_error: str = setting("raise", "`skip` leaves out invalid rows, and reports their number")


@dataclass
class TrackerConfig:
    """Weights & Biases."""

    name: str = setting("none", "`wandb`")
    project: str = setting("lazyllm-bench", "W&B's project")
    entity: str | None = setting(None, "W&B's user or team; `null`: the key's owner")
    group: str | None = setting(None, "W&B's group; `null`: the name of the run's folder")
    mode: str = setting("offline", "`offline` writes to `<run folder>/wandb`; `online` needs a key")
    tags: list[str] = setting([], "W&B's tags")


@dataclass
class RunConfig(SuiteSettings):
    """All settings of a run, those of each suite under its name. A method's own are the fields of its class."""

    model: ModelConfig = field(default_factory=ModelConfig)
    method: dict[str, Any] = field(default_factory=dict)
    compare: Any = setting(
        None,
        "several arms instead of `method`: `compare=[lazy,fastkv]`, or `compare={label: {name: lazy, schedule: "
        "paper}, ...}`; a list of values, or `seeds: 5`, makes an arm of each",
    )
    baseline: bool = setting(True, "also measure the standard model on every example, among the arms")
    dataset: dict[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    limit: int | None = setting(None, "N examples of each dataset; `null`: all (embedded: 12)")
    subset: str = setting(
        "first",
        "which N: `first`, `random` (by `seed`), or `by_length`, spread over the dataset's lengths; `mini`: of the 187 "
        "rows of LongBench that MiniLongBench chose",
    )
    max_new_tokens: int | None = setting(None, "shorter answers than the dataset allows, for a quick look")
    batch_size: int | None = setting(
        None,
        "answers that decode together, after TTFT was measured alone; 1 also times every step; `null`: as many as fit "
        "into a GPU's memory, up to 8, and 1 on a CPU",
    )
    warmup: int = setting(5, "warm-up runs of each arm before the first example")
    seed: int = setting(0, "of random weights, of random subsets, and the default of methods with a `seed`")
    threads: int | None = setting(None, "CPU threads, up to 1024; `null`: torch's choice (`tiny`: 1)")
    out: str | None = setting(None, "the run's folder; `null`: `runs/<model>-<method or label>-<data>-<fingerprint>`")
    trace: int = setting(0, "keep each layer's importance and selection for the first N examples of each dataset")
    fidelity: str | None = setting(
        None, "`answer`: also feed the baseline's answer and the gold one to every arm; not timed"
    )
    speedup: str | None = setting(
        None, "the ideal TTFT speedup at which `experiment=field` compares methods, such as `2x`"
    )
    draft: str | None = setting(
        None,
        "another model, by folder, hub id or preset: SpecPrefill's draft in `experiment=field` and `speed`",
    )
    label: str | None = setting(None, "the comparison's name, in titles and folders")
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


def documented(schema: Any) -> list[tuple[str, str, str]]:
    """(key, default, description) of every setting with a description, in the schema's order. schema: an instance."""
    rows = []
    for item in fields(schema):
        value = getattr(schema, item.name)
        if is_dataclass(value):
            rows += [(f"{item.name}.{key}", *rest) for key, *rest in documented(value)]
        elif "text" in item.metadata:
            default = "" if value == MISSING_VALUE else "null" if value is None else str(value)
            rows.append((item.name, default.lower() if isinstance(value, bool) else default, item.metadata["text"]))
    return rows


def check_unused(group: str, settings: Any, instead: str) -> None:
    """Refuse settings of a group that were changed and would change nothing. Raises UserError."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        require(value == getattr(type(settings)(), item.name), f"{group}.{item.name}", value, instead)
