"""A visit as an object and as a line, by one schema; what is no visit is refused with its line."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eval.store.folder import read_visits
from eval.store.record import Answer, Failure, Visit, compact_counts
from eval.store.trace import read_trace, trace_name
from lazyllm.errors import UserError
from tests.eval.made import small_trace
from tests.eval.store.visits import FAILED, visit

st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
SHARES = st.none() | st.floats(0, 1)
VISITS = st.builds(
    Visit,
    dataset=st.just("hops"),
    arms=st.dictionaries(
        st.text(), st.builds(Answer, score=SHARES, rouge_l=SHARES) | st.builds(Failure), max_size=3
    ),
    **dict.fromkeys(("groups", "gold", "prompt_end", "kernel", "attention_ceiling"), ...),
)


@settings(max_examples=settings().max_examples // 4, suppress_health_check=[HealthCheck.too_slow])
@given(VISITS)
def test_visit_comes_back_from_its_line_to_the_last_bit(made: Visit) -> None:
    text = made.to_json()
    assert text.isascii()
    assert "\n" not in text
    assert json.loads(text) == made.model_dump()
    assert Visit.from_json(text) == Visit.from_json(text.encode()) == made
    assert made.answers | made.failures == made.arms


def test_fields_that_are_left_out_take_their_defaults() -> None:
    made = visit(1, groups=[], gold=[], prompt_end="")
    values = made.model_dump()
    for key in ("groups", "gold", "prompt_end", "kernel", "attention_ceiling"):
        del values[key]
    for fields in values["arms"].values():
        for name in [name for name, value in fields.items() if value is None]:
            if name not in ("peak_memory_bytes", "prefill_mfu"):  # whether measured is always said
                del fields[name]
    assert Visit.from_json(json.dumps(values)) == made


def changed(**changes: Any) -> dict[str, Any]:
    """A visit's values with some changed; `lazy` changes values of the method's answer."""
    values = visit(1).model_dump()
    values["arms"]["lazy"] |= changes.pop("lazy", {})
    return values | changes


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("text", "JSON"),
        ([], "line: Input should be"),
        (changed(odd=1), "odd"),
        (changed(id=3), "id: Input should be a valid string"),
        (changed(dataset="nosuch"), "there is no dataset 'nosuch'"),
        (changed(order="lazy"), "order: Input should be a valid array"),
        (changed(prompt_tokens=1.0), "prompt_tokens"),
        (changed(arms=None), "arms"),
        (changed(arms={"lazy": "why"}), r"arms\.lazy"),
        (changed(arms={"lazy": {"error": "why"}}), r"arms\.lazy\.traceback"),
        (changed(lazy=FAILED.model_dump()), r"arms\.lazy\.text: Extra"),  # an answer and a failure
        (f"{visit(1).to_json()}{visit(2).to_json()}", "JSON"),
        *(
            (changed(lazy={name: value}), rf"arms\.lazy\.{name}")
            for name, value in (
                ("odd", 1), ("score", True), ("score", math.nan), ("ttft_s", math.inf),
                ("kv_bytes", 123.5),
                ("text", 3), ("token_ids", {}), ("token_ids", [0.5]), ("computed", [1]),
                ("ttft_s", None), ("ttft_s", 0.0), ("score", 40.0), ("rouge_l", -0.1),
            )
        ),
    ],
)  # fmt: skip
def test_reader_refuses_an_invalid_line_with_its_number(
    tmp_path: Path, line: Any, reason: str
) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "visits.jsonl").write_text(f"{visit(0).to_json()}\n{text}\n")
    with pytest.raises(UserError, match=rf"visits\.jsonl:2: not a line of visits .*({reason})"):
        read_visits(tmp_path)


def test_compact_counts_lose_nothing() -> None:
    rng = random.Random(0)
    for _ in range(50):
        widths = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        counts = np.array([[rng.randint(0, 2) for _ in widths] for _ in range(rng.randint(1, 5))])
        full = np.repeat(counts, widths, axis=1)
        layers, compact = compact_counts(full)
        assert np.array_equal(np.repeat(np.array(compact), layers, axis=1), full)
        neighbours = zip(np.transpose(compact), np.transpose(compact)[1:], strict=False)
        assert all((left != right).any() for left, right in neighbours)


def test_traces_have_names_of_their_own(tmp_path: Path) -> None:
    ids = ["a", "a b", "a_b", "a/b", "x" * 90, "x" * 91, "\u6771" * 80, "\u4eac" * 80]
    arms = ("lazy", "lazy schedule={2: 0.3}")
    names = [trace_name("lookup", name, arm) for name in ids for arm in arms]
    assert names[0] == "lookup-a-lazy.json"
    assert trace_name("lookup", "a-b", "c") != trace_name("lookup", "a", "b-c")
    assert len(set(names)) == len(names)
    assert "/" not in "".join(names)
    assert max(len(name.encode()) for name in names) < 200
    file = tmp_path / names[0]
    file.write_text(small_trace().to_json())
    assert read_trace(file) == small_trace()
    file.write_text(small_trace().to_json().replace('"tokens"', '"odd"'))
    with pytest.raises(UserError, match="not a trace"):
        read_trace(file)
