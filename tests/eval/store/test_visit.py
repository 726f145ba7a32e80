"""A visit as an object and as a line, by one schema; what is no visit is refused with its line."""

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eval.store.folder import read_visits
from eval.store.visit import Answer, Trace, Turn, Visit, compact_counts, read_trace
from lazyllm.errors import UserError
from tests.eval.store.visits import turn, visit

st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))


@st.composite
def visits(draw: st.DrawFn) -> Visit:
    """Visits in which everything that may be empty, missing or of another length is."""
    turns = draw(st.lists(st.from_type(Turn), min_size=1, max_size=3))
    own = st.lists(st.from_type(Answer), min_size=len(turns), max_size=len(turns))
    answers = st.dictionaries(st.text(), own, max_size=2)
    known: dict[str, Any] = {"dataset": st.just("hops"), "turns": st.just(turns), "answers": answers}
    return draw(st.builds(Visit, **known, groups=..., failures=..., attention_kernel=...))


@settings(max_examples=settings().max_examples // 4, suppress_health_check=[HealthCheck.too_slow])
@given(visits())
def test_visit_comes_back_from_its_line_to_the_last_bit(made: Visit) -> None:
    line = made.to_json()
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line) == asdict(made)
    assert Visit.from_json(line) == Visit.from_json(line.encode()) == made


def test_fields_that_are_left_out_take_their_defaults() -> None:
    values = asdict(visit(1))
    for key in ("groups", "failures", "attention_kernel"):
        del values[key]
    for answers in values["answers"].values():
        for name in [name for name, value in answers[0].items() if value is None]:
            if name not in ("rouge_l", "total_s"):
                del answers[0][name]
    assert Visit.from_json(json.dumps(values)) == visit(1)


def changed(**changes: Any) -> dict[str, Any]:
    """A visit's values with some changed; `lazy` changes values of the method's measurement."""
    values = asdict(visit(1))
    values["answers"]["lazy"][0] |= changes.pop("lazy", {})
    return values | changes


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("text", "JSON"),
        ([], "line: Input should be"),
        (changed(odd=1), "odd"),
        (changed(lazy={"odd": 1}), r"answers\.lazy\.0\.odd"),
        (changed(id=3), "id: Input should be a valid string"),
        (changed(dataset="nosuch"), "there is no dataset 'nosuch'"),
        (changed(order="lazy"), "order: Input should be a valid array"),
        (changed(turns=[asdict(turn()) | {"tokens": 1.0}]), r"turns\.0\.tokens"),
        (changed(turns=[asdict(turn())] * 2), r"answers\.baseline: has 1 turns, not 2"),
        (changed(answers=None), "answers"),
        (changed(failures={"lazy": "why"}), r"failures\.lazy"),
        (f"{visit(1).to_json()}{visit(2).to_json()}", "JSON"),
        *(
            (changed(lazy={name: value}), rf"answers\.lazy\.0\.{name}")
            for name, value in (
                ("score", True), ("score", math.nan), ("ttft_s", math.inf), ("kv_bytes", 123.5), ("text", 3),
                ("token_ids", {}), ("token_ids", [0.5]), ("request", {}), ("computed", [1]),
            )
        ),
    ],
)  # fmt: skip
def test_reader_refuses_an_invalid_line_with_its_number(tmp_path: Path, line: Any, reason: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "visits.jsonl").write_text(f"{visit(0).to_json()}\n{text}\n")
    with pytest.raises(UserError, match=rf"visits\.jsonl:2: not a line of visits .*({reason})"):
        read_visits(tmp_path)


def test_compact_counts_lose_nothing() -> None:
    rng = random.Random(0)
    for _ in range(50):
        steps, groups = rng.randint(1, 5), rng.randint(1, 4)
        widths = [rng.randint(1, 4) for _ in range(groups)]
        counts = np.array([[rng.randint(0, 2) for _ in range(groups)] for _ in range(steps)])
        full = np.repeat(counts, widths, axis=1)
        starts, compact = compact_counts(full)
        ends = [*starts[1:], full.shape[1] + 1]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        assert np.array_equal(np.repeat(np.array(compact), lengths, axis=1), full)


def test_traces_have_names_of_their_own(tmp_path: Path) -> None:
    ids = ["a", "a b", "a_b", "a/b", "x" * 90, "x" * 91, "\u6771" * 80, "\u4eac" * 80]
    names = [Trace.file_name("lookup", name, arm) for name in ids for arm in ("lazy", "lazy schedule={2: 0.3}")]
    assert names[0] == "lookup-a-lazy.json"
    assert Trace.file_name("lookup", "a-b", "c") != Trace.file_name("lookup", "a", "b-c")
    assert len(set(names)) == len(names)
    assert "/" not in "".join(names)
    assert max(len(name.encode()) for name in names) < 200
    made = Trace("lookup", "a", "lazy", ["x"], ["y"], [[1.0]], [{2: [0]}, {}], [1], [[1]])
    (tmp_path / names[0]).write_text(made.to_json())
    assert read_trace(tmp_path / names[0]) == made
    (tmp_path / names[0]).write_text(json.dumps(vars(replace(made)) | {"tokens": 1, "odd": 2}))
    with pytest.raises(UserError, match="not a trace"):
        read_trace(tmp_path / names[0])
