"""An example of a run, ready to be answered."""

from dataclasses import dataclass
from typing import Any

from eval.benchmarks.prompts import BuiltPrompt
from eval.benchmarks.suite import Dataset, Example
from eval.run.arms import Arm


@dataclass(frozen=True)
class Case:
    """One example with its prompt.

    end_ids: tokens that end an answer. arms: those that a visit is to measure, in this order.
    """

    dataset: Dataset
    example: Example
    prompt: BuiltPrompt
    max_new_tokens: int
    end_ids: tuple[int, ...]
    arms: tuple[Arm, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.dataset.name, self.example.id

    @property
    def prompts(self) -> tuple[Any, ...]:
        """The prompt, and the messages of later turns."""
        return self.prompt, *self.prompt.turns

    @property
    def answering(self) -> dict[str, Any]:
        """The options of `lazyllm.generate`."""
        least = 1 if self.dataset.newline_ends else 0
        return {"max_new_tokens": self.max_new_tokens, "eos_token_ids": self.end_ids, "min_new_tokens": least}
