"""Facts about methods for tables and figures, from the methods' classes."""

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
    """The method's class; None if its package is not installed."""
    from lazyllm.methods import by_name  # not at the top: torch is slow to import

    try:
        return by_name(name)
    except UserError:
        return None


def is_diagnostic(name: str) -> bool:
    """Whether it is a diagnostic: a reference whose TTFT leaves out the cost of its selection, not a method."""
    kind = kind_of(name)
    return kind is not None and kind.diagnostic


def marked(label: str, method: str) -> str:
    """A setting's label, marked if it is a diagnostic's."""
    return f"{label} (diagnostic)" if is_diagnostic(method) else label


def place_of(name: str) -> tuple[float, str]:
    """The sort key of methods in tables and legends: unknown ones come last."""
    kind = kind_of(name)
    return (float("inf"), name) if kind is None else (kind.order, kind.label)
