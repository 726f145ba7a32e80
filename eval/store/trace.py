"""A trace: what each layer chose for one example under one arm, for the pictures of Figure 2 and
of the mechanism.
"""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

from pydantic import ValidationError

from eval.benchmarks.rows import sha256_of
from eval.store.record import Record
from lazyllm.errors import UserError, reason_of


class Trace(Record):
    """One example under one arm.

    tokens: [n] the text of each prompt token; joined they are the prompt, with the names of special
        tokens.
    generated: the text of each generated token; "" for a token that ends within a letter. All are
        "" in records that leave out the texts.
    importance: [layers][n] Eq. 1 in a prefill without pruning.
    selected: per step {layer (1-based; 0 before the first layer): ascending positions that enter
        the next layer}, prompt and generated tokens; empty in later steps if a method selects in
        prefill only.
    group_layers, computed: as of `eval.store.record.Answer`.
    """

    dataset: str
    id: str
    arm: str
    tokens: list[str]
    generated: list[str]
    importance: list[list[float]]
    selected: list[dict[int, list[int]]]
    group_layers: list[int]
    computed: list[list[int]]

    def to_json(self) -> str:
        """One line of JSON, with a newline at its end."""
        return self.model_dump_json() + "\n"


def trace_name(dataset: str, example: str, arm: str) -> str:
    """The trace's file name: with a hash of id and arm if they cannot be part of one, or if the
    arm has a "-".
    """
    wanted = f"{example}-{arm}"
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", wanted)[:80]
    end = "" if safe == wanted and "-" not in arm else f"-{sha256_of([example, arm])[:8]}"
    return f"{dataset}-{safe}{end}.json"


def read_trace(file: Path) -> Trace:
    """Read the trace in a file, which may be gzipped. Raises UserError if it is not a trace."""
    try:
        data = file.read_bytes()
        return Trace.model_validate_json(gzip.decompress(data) if file.suffix == ".gz" else data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise UserError(f"{file}: not a trace ({where}: {first['msg']})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: not a trace ({reason_of(error)})") from error
