"""The memory of a model's device while several arms answer: failures, other arms' models, kept prefills, peaks."""

import logging
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from eval.run.case import Case
from eval.run.device_lock import held
from eval.store.visit import Failure
from lazyllm.engine.devices import read_clock
from lazyllm.engine.generation import Prefilled
from lazyllm.errors import UserError, place_of, reason_of
from lazyllm.measuring import read_peak, release_memory, reset_peak
from lazyllm.methods import Method
from lazyllm.methods.support.other_models import HELPERS

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Memory:
    """The device of a model. Besides the arm that answers, it holds other arms' models and kept prefills.

    kept: prefills of answers in the visits so far, for forced answers after them.
    """

    device: torch.device
    kept: list[Prefilled] = field(default_factory=list)
    _highest: int | None = None  # the peak before the last reset

    def tried(self, case: Case, do: Callable[[], T]) -> T | Failure:
        """What a call returns, or its failure. A UserError is raised: all would fail."""
        try:
            return do()
        except UserError:
            raise
        except Exception as error:
            failure = failure_of(case, error)
        free(self.device)  # not in the handler, as the error's frames hold memory
        return failure

    def begin_peak(self) -> None:
        """From now on, watch the peak of one arm."""
        self._highest = None
        reset_peak(self.device)

    def peak(self, method: Method) -> int | None:
        """Its peak in bytes so far, without other arms' models and kept prefills; None if the device tells none."""
        peak = read_peak(self.device)
        if peak is None:
            return None
        now = peak - HELPERS.nbytes(method.models(), self.device) - sum(prefilled.nbytes for prefilled in self.kept)
        return now if self._highest is None else max(now, self._highest)

    def keep(self, method: Method, prefilled: Prefilled) -> Prefilled:
        """A copy of a prompt that has run, in no peak. It is held until `forget`."""
        self._highest = self.peak(method)
        self.kept.append(prefilled.fork())
        reset_peak(self.device)
        return self.kept[-1]

    def forget(self, prefills: Collection[Prefilled | None]) -> None:
        """Hold these no longer."""
        self.kept = [prefilled for prefilled in self.kept if not any(prefilled is one for one in prefills)]


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host lacks memory. cuBLAS has its own words for it."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def failure_of(case: Case, error: Exception) -> Failure:
    """The error that is being handled, as a visit stores it."""
    advice = f" ({place_of(error)})"
    if is_out_of_memory(error):
        tokens = len(case.prompt.token_ids)
        advice = f"; out of memory at {tokens} prompt tokens: lower model.max_prompt_tokens, or give a smaller model"
    return Failure(reason=reason_of(error) + advice, traceback=traceback.format_exc())


def free(device: torch.device) -> None:
    """Free the memory that a failed example left. Raises UserError if the device has failed."""
    try:
        release_memory(device)
        read_clock(device)  # waits for it
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"{device} does not recover from the last failure ({why}). Finished examples are safe: give the same "
            "command again"
        ) from error


@contextmanager
def held_and_released(device: torch.device) -> Iterator[None]:
    """Hold the device until the block ends, and then free its memory, before another run gets it."""
    with held(device):
        try:
            yield
        finally:
            HELPERS.unload()
            try:
                release_memory(device)
            except RuntimeError as error:  # only logged: the run's own error is raised
                log.warning("%s: its memory could not be freed (%s)", device, error)
