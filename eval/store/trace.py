"""A trace: tokens, importance and selections of one example, stored in a separate file of the run.

Figure 2, the mechanism's figure and the report's view of kept tokens are drawn from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lazyllm.errors import UserError


@dataclass(frozen=True)
class Trace:
    """One example under one method.

    tokens: [n] the text of each prompt token; joined they are the prompt, with the names of special tokens.
    generated: the text of each generated token; "" for a token that ends within a letter.
    importance: [layers][n] Eq. 1 in a prefill without pruning.
    selected: per step {layer (1-based; 0 before the first layer): ascending positions that enter the next layer},
        prompt and generated tokens; empty in later steps if a method selects in prefill only.
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
        """The trace in a file's text. Raises ValueError, TypeError or KeyError if it is not a trace."""
        values: dict[str, Any] = json.loads(text)
        values["selected"] = [{int(layer): kept for layer, kept in step.items()} for step in values["selected"]]
        return cls(**values)

    @staticmethod
    def file_name(dataset: str, example: str) -> str:
        """The trace's file name. An example's id may be any text."""
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in example)
        return f"{dataset}-{safe[:80]}.json"


def read_trace(file: Path) -> Trace:
    """The trace in a file. Raises UserError if it is not a trace."""
    try:
        return Trace.from_json(file.read_text(encoding="utf-8"))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file}: not a trace ({type(error).__name__}: {error})") from error
