"""Where a backend of attention builds a plan for each new shape: no timed prefill is the first of its shapes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eval.run import decode
from eval.run.arms import Arm
from eval.run.asked import Asked
from eval.run.decode import Bench
from eval.run.loop import in_turn
from eval.run.run import prepare
from lazyllm.engine import decoder, session
from lazyllm.methods.support import other_models
from tests.runs import arm, bench_of, small_run


def arms(**settings: Any) -> list[Arm]:
    return [
        arm("baseline", name="baseline", **settings),
        arm("lazy", name="lazy", schedule={2: 0.5}, **settings),
        arm("pyramid", name="pyramidinfer", **settings),
        arm("draft", name="specprefill", keep=0.5, draft="tiny", **settings),
    ]


@cache
def plan(turns: int) -> Asked:
    return small_run(None, limit=2, turns=turns, dataset={"lookup": True})


model = cache(lambda: plan(1).subject.load())


class Recorder:
    """Calls of attention in prefills, by shape and strides. early: those timed before they ran untimed."""

    def __init__(self) -> None:
        self.untimed, self.timed, self.early = Counter[Any](), Counter[Any](), Counter[Any]()
        self.rehearses = self.decodes = False

    def note(self, *tensors: torch.Tensor) -> None:
        shape = tuple((tuple(one.shape), one.stride()) for one in tensors)
        if not self.decodes:
            (self.untimed if self.rehearses else self.timed)[shape] += 1
            self.early[shape] += shape not in self.untimed


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What runs while every model is said to build plans, once the model is loaded and checked."""
    model()
    found, attend, backends = Recorder(), F.scaled_dot_product_attention, decoder.backends
    rehearse = Bench._rehearse

    def noted(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        found.note(query, key, value)
        return attend(query, key, value, *args, **kwargs)

    @contextmanager
    def chosen(of: Any, devices: Any, decodes: bool) -> Iterator[None]:
        found.decodes = decodes
        with backends(of, devices, decodes):
            yield

    def rehearsing(bench: Bench, *args: Any) -> None:
        found.rehearses = True
        rehearse(bench, *args)
        found.rehearses = False

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    for module in (decoder, session):
        monkeypatch.setattr(module, "backends", chosen)
    monkeypatch.setattr(Bench, "_rehearse", rehearsing)
    monkeypatch.setattr(decode, "builds_plans", lambda model, device: True)
    monkeypatch.setattr(other_models.HELPERS, "loaded", {})
    return found


@pytest.mark.parametrize(("turns", "batch_size"), [(1, 1), (1, 6), (3, 1)])
@pytest.mark.parametrize("later", ["continue", "recompute"])
def test_no_timed_prefill_is_the_first_of_its_shapes(
    recorded: Recorder, turns: int, batch_size: int, later: str
) -> None:
    """Those of a draft too, and those of each later turn that runs the whole text again."""
    made, compared = plan(turns), arms(turns=later)
    bench = bench_of(model(), made.subject.tokenizer, compared, chat=made.subject.chat, batch_size=batch_size)
    todo = [replace(case, arms=in_turn(compared, number)) for number, case in enumerate(prepare(made).cases)]
    assert not any(visit.failures for visit in bench.visits(todo))
    assert len(recorded.timed) > len(compared)
    assert not +recorded.early
    assert recorded.untimed >= recorded.timed  # the draft's check, once, is untimed too
