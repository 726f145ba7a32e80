"""The states of tokens, by hand and against the reference implementation; and their picture."""

import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import PathPatch

import lazyllm
from eval.analysis import mechanism
from eval.analysis.mechanism import State, data, mechanism_frame, plot, token_states
from eval.store.record import compact_counts
from eval.store.results import Results
from lazyllm.methods import Lazy
from scripts.dev import records
from tests.eval.made import drawn, small_trace, stored, texts, with_traces
from tests.reference import lazy_reference, random_model

LAYERS = 5


@pytest.mark.parametrize("seed", range(2))
def test_revived_tokens_are_those_that_the_reference_takes_from_its_aux_cache(seed: int) -> None:
    prompt = random.Random(seed).choices(range(97), k=21)
    schedule = {1: 0.6, 3: 0.5}
    model = random_model("llama", seed, num_layers=LAYERS)
    expected = lazy_reference(random_model("llama", seed, num_layers=LAYERS), prompt, schedule, 6)
    out = lazyllm.generate(model, prompt, Lazy(schedule), 6, eos_token_ids=())
    layers, computed = compact_counts(out.computed)
    trace = small_trace(
        tokens=["word"] * len(prompt), generated=["word"] * len(out.token_ids),
        importance=[[0.0] * len(prompt)] * LAYERS, selected=out.selected, group_layers=layers,
        computed=computed,
    )  # fmt: skip
    states = token_states(trace)
    for step, revived in enumerate(expected.revived):
        for layer in range(1, LAYERS + 1):
            passed = [cut for cut in schedule if cut < layer and step > 0]
            came_back = {position for cut in passed for position in revived[cut]}
            here = came_back & set(expected.selected[step][max(passed)]) if passed else set()
            assert set(np.flatnonzero(states[step, layer - 1] == State.REVIVED)) == here
    assert any(positions for step in expected.revived[1:] for positions in step.values())


STATES = [  # of `small_trace`, step by step and layer by layer
    [["computed", "computed", "computed"], ["pruned", "pruned", "computed"]],
    [["cached", "cached", "cached", "computed"], ["revived", "pruned", "stored", "computed"]],
    [
        ["cached", "cached", "cached", "cached", "computed"],
        ["cached", "pruned", "stored", "cached", "computed"],
    ],
]


def test_rows_are_the_states_that_a_hand_finds() -> None:
    both = mechanism_frame(small_trace())
    frame = both[both["panels"] == mechanism.PRUNED]
    found = frame.groupby(["step", "layer"])["state"].agg(list).tolist()
    assert found == [layer for step in STATES for layer in step]
    assert (frame["group"] == frame["layer"]).all()  # the boundary lies between the two
    assert (frame["kind"] == np.where(frame["position"] < 3, "prompt", "generated")).all()
    assert frame.drop_duplicates("position")["text"].tolist() == ["A", " $B$", "C\n", "D", "E"]
    assert frame.drop_duplicates(["step", "layer"])["computed"].tolist() == [3, 1, 3, 2, 3, 2]
    with pytest.raises(ValueError, match="row a: the trace's selections and its counters disagree"):
        token_states(small_trace(computed=[[3, 1], [3, 3], [3, 3]]))


def test_a_standard_llm_comes_first_and_computes_all_once() -> None:
    frame = mechanism_frame(small_trace())
    rows = frame[frame["panels"] == mechanism.STANDARD]
    assert frame["panels"].tolist()[: len(rows)] == [mechanism.STANDARD] * len(rows)
    assert len(rows) == 2 * (3 + 4)  # two layers; the prefill, and the first decoding step
    is_new = (rows["step"] == 0) | (rows["position"] == 3)
    assert rows["state"].tolist() == is_new.map({True: "computed", False: "cached"}).tolist()
    assert (set(rows["group"]), set(rows["computed"])) == ({1}, {3})


# A boundary after layer 2 of 6; the second step revives positions 70 to 79 and no others
LONG = small_trace(
    tokens=[f"w{place}" for place in range(120)], generated=list("vwxyz"),
    importance=[[1 / 120] * 120] * 6,
    selected=[{2: [5, 70, 119]}, {2: [*range(70, 80), 120]},
    *({2: [5, *range(120, end)]} for end in (122, 123, 124))],
    group_layers=[2, 4], computed=[[120, 3], *[[120, 12]] * 4],
)  # fmt: skip


def test_shown_are_the_first_steps_and_the_window_with_most_revived() -> None:
    frame = mechanism_frame(LONG)
    assert sorted(set(frame["step"])) == [0, 1, 2, 3]
    assert sorted(set(frame.query("kind == 'generated'")["position"])) == [120, 121, 122]
    positions = sorted(set(frame.query("kind == 'prompt'")["position"]))
    assert len(positions) == mechanism.WINDOW
    assert set(range(71, 80)) <= set(positions)  # 70 was computed in prefill
    alike = LONG.model_copy(
        update={"selected": [{2: [5, 70, 119]}] * 5, "computed": [[120, 3]] * 5}
    )
    found = mechanism_frame(alike).query("kind == 'prompt'")["position"]  # nothing is revived
    assert sorted(set(found)) == list(range(mechanism.WINDOW))


def test_picture_shows_every_cell(tmp_path: Path) -> None:
    frame = data(Results([stored([], "static_pruning"), with_traces(stored([]), tmp_path, LONG)]))
    picture = drawn(plot, frame)
    panels = list(frame.groupby(["panels", "step"], sort=False))
    assert len(picture.axes) == len(panels) == 2 + 4
    for ((name, step), rows), axes in zip(panels, picture.axes, strict=True):
        counts = [
            len(patch.get_path().codes) // 5
            for patch in axes.patches
            if isinstance(patch, PathPatch)
        ]
        assert sorted(counts) == sorted(rows["state"].value_counts())
        assert sum(counts) == 6 * (mechanism.WINDOW + step)
        groups = ["layers 1–6"] if name == mechanism.STANDARD else ["layers 1–2", "layers 3–6"]
        assert [label.get_text() for label in axes.get_yticklabels()] == groups
    assert {
        "LazyLLM: prefill", "Standard LLM: decoding step 1, the newest token is “v”", "120", "3",
        "12", "w75",
        "prompt tokens computed so far, of 120",
        *(name for name, _, _ in mechanism._LOOKS.values()),
    } <= {*texts(picture)}  # fmt: skip


def test_picture_writes_any_token() -> None:
    written = texts(plot(mechanism_frame(small_trace(generated=["$x_1$", "\n\t", "F"]))))
    assert {"A", "$B$", "C↵", "$x_1$", "↵⇥"} <= {*written}
    assert mechanism._shorten(" ") == "␣"
    assert mechanism._shorten("abcdefghijklmnop") == "abcdefghijk…"
    assert mechanism._shorten(float("nan")) == "␣"  # an empty text of a CSV


def test_picture_without_texts_numbers_the_tokens() -> None:
    picture = plot(mechanism_frame(records.trace_without_texts(small_trace(dataset="hotpotqa"))))
    written = texts(picture)
    assert [tick.get_text() for tick in picture.axes[-1].get_xticklabels()] == list("12345")
    assert "LazyLLM: decoding step 1" in written
    assert "␣" not in "".join(written)


def test_states_differ_in_lightness_or_mark() -> None:
    for (_, fill, mark), (_, other, others) in combinations(mechanism._LOOKS.values(), 2):
        lightness, other_lightness = (
            np.dot(to_rgb(colour), [0.2126, 0.7152, 0.0722]) for colour in (fill, other)
        )
        assert bool(mark) != bool(others) or abs(lightness - other_lightness) > 0.2
