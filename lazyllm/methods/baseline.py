"""The standard model: every prompt token in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lazyllm.engine.inputs import Group
from lazyllm.engine.method import Method


@dataclass(frozen=True)
class Baseline(Method):
    """No pruning. It runs in the same loop and cache as the methods, so a speedup is the method's own."""

    label: ClassVar[str] = "baseline"
    order: ClassVar[int] = 0
    colour: ClassVar[str | None] = "#000000"
    marker: ClassVar[str | None] = "X"

    def groups(self, num_layers: int, n: int) -> list[Group]:
        return [Group(range(num_layers), n)]
