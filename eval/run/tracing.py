"""What happened inside one example: every layer's importance, and which tokens each step kept after which layer.

A trace is a file of its own beside a run's records, made by a generation of its own, so that no timing suffers from it.
Figure 2, the picture of the mechanism and the report's drawing over the text are made from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.store.record import compact_counts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from eval.benchmarks.prompts import Prompt
    from eval.run.measure import Case


@dataclass(frozen=True)
class Trace:
    """One example under one method.

    tokens: [n] the text of each prompt token; together they are the prompt, but for special tokens, which are named.
    generated: the text of each generated one; "" for one that ends in the middle of a letter.
    importance: [layers][n] Eq. 1 in a prefill without pruning.
    selected: per step {layer (1-based; 0 for before the model): ascending positions that enter the next layer}, prompt
        and generated; a method that selects in prefill only has empty steps after the first.
    group_starts, computed: as in `eval.store.record.Measurement`.
    """

    dataset: str
    id: str
    tokens: list[str]
    generated: list[str]
    importance: list[list[float]]
    selected: list[dict[int, list[int]]]
    group_starts: list[int]
    computed: list[list[int]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace of a file's text. Raises ValueError, TypeError or KeyError where it is none."""
        values: dict[str, Any] = json.loads(text)
        values["selected"] = [{int(layer): kept for layer, kept in step.items()} for step in values["selected"]]
        return cls(**values)

    @staticmethod
    def file_name(dataset: str, example: str) -> str:
        """Ids are hashes and counters, but a stranger's may hold anything."""
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in example)
        return f"{dataset}-{safe[:80]}.json"


def read_trace(file: Path) -> Trace:
    """Raises ValueError where the file is no trace."""
    try:
        return Trace.from_json(file.read_text(encoding="utf-8"))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{file}: not a trace ({type(error).__name__}: {error})") from error


def trace(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, case: Case) -> Trace:
    """Generate once more, keeping what the records leave out."""
    from eval.run.measure import generate_case  # not at the top: a stored trace is drawn without torch
    from lazyllm.engine.partial import importance_of_layers

    out = generate_case(model, case, case.method)
    found = importance_of_layers(model, case.prompt.token_ids)
    group_starts, computed = compact_counts(out.computed)
    return Trace(
        dataset=case.dataset.name,
        id=case.example.id,
        tokens=_texts_of_prompt(tokenizer, case.prompt),
        generated=_texts_of_answer(tokenizer, out.token_ids),
        importance=[[float(f"{value:.4g}") for value in row] for row in found.tolist()],
        selected=out.selected,
        group_starts=group_starts,
        computed=computed,
    )


def _texts_of_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[str]:
    """A token alone would lose the space before its word, so each is cut out of the text where that can be told."""
    names: Any = tokenizer.convert_ids_to_tokens(list(prompt.token_ids))
    if prompt.spans is None:
        return [str(tokenizer.decode([one])) for one in prompt.token_ids]
    texts, done = [], 0
    for name, (start, stop) in zip(names, prompt.spans.tolist(), strict=True):
        texts.append(prompt.text[done:stop] if stop > start else str(name))
        done = max(done, stop)
    return texts


def _texts_of_answer(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[str]:
    """What each token adds to the answer; a letter of several tokens is the last one's."""
    shown, texts = "", []
    for end in range(1, len(token_ids) + 1):
        whole = str(tokenizer.decode(token_ids[:end]))
        unfinished = whole.endswith("\ufffd") and end < len(token_ids)
        texts.append("" if unfinished else whole[len(shown) :])
        shown = shown if unfinished else whole
    return texts
