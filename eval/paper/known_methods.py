"""What tables and figures know of methods: what each method's own class says of it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from lazyllm.errors import UserError

if TYPE_CHECKING:
    from lazyllm.methods import Method

BASELINE = "baseline"
STUDIED = "lazy"  # the paper's own method


@cache
def kind_of(name: str) -> type[Method] | None:
    """The method's class; None for a method of a package that is not installed here."""
    from lazyllm.methods import by_name  # not at the top: torch is slow to import

    try:
        return by_name(name)
    except UserError:
        return None


def is_diagnostic(name: str) -> bool:
    """Whether it is no method but a reference, whose price is not in its TTFT."""
    kind = kind_of(name)
    return kind is not None and kind.diagnostic


def marked(label: str, method: str) -> str:
    """A setting's label, which says so if it is of a diagnostic."""
    return f"{label} (diagnostic)" if is_diagnostic(method) else label


def place_of(name: str) -> tuple[float, str]:
    """What methods are sorted by in tables and legends: unknown ones come last."""
    kind = kind_of(name)
    return (float("inf"), name) if kind is None else (kind.order, kind.label)
