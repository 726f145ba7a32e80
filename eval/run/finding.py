"""One finding of `lazyllm-bench doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, MISSING, NOT_NEEDED = "ok", "missing", "not needed"


@dataclass(frozen=True)
class Finding:
    """A thing, its state (`OK`, `MISSING` or `NOT_NEEDED`), and a sentence: what was found, or how to fix it."""

    thing: str
    state: str
    says: str
