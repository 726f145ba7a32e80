"""What `lazyllm-bench doctor` finds out about one thing."""

from __future__ import annotations

from dataclasses import dataclass

OK, MISSING, NOT_NEEDED = "ok", "missing", "not needed"


@dataclass(frozen=True)
class Finding:
    """A thing, its state (`OK`, `MISSING` or `NOT_NEEDED`), and a sentence: what was found, or the mending command."""

    thing: str
    state: str
    says: str
