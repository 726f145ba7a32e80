"""Run the standard model: every prompt token in every layer."""

from dataclasses import dataclass

from lazyllm.engine.depth import Depth
from lazyllm.engine.inputs import Group
from lazyllm.engine.method import Method


@dataclass(frozen=True)
class Baseline(Method):
    """Prune nothing. It runs in the same loop and cache as the methods, so a speedup is theirs."""

    label = "baseline"
    order = 0
    colour = "#000000"
    marker = "X"

    def groups(self, depth: Depth, n: int) -> list[Group]:
        return [Group(range(depth.count), n)]
