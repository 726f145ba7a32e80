"""Halves: of every dataset one to tune on and one held out, whatever part of it is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.benchmarks.longbench import Example
from eval.benchmarks.split import HALVES, in_half
from eval.run.loop import run
from eval.run.plan import prepare
from eval.store.results import find_runs
from lazyllm.errors import UserError
from tests.eval.run.test_loop import config_of

IDS = st.lists(st.text(max_size=8), unique=True, max_size=40)


def examples_of(ids: list[str]) -> list[Example]:
    return [Example("lookup", one, "", "", ("answer",), (), 1, "en") for one in ids]


def ids_of(dataset: str, examples: list[Example], half: str | None) -> list[str]:
    return [one.id for one in in_half(dataset, examples, half)]


@settings(deadline=None)
@given(IDS, st.sampled_from(["lookup", "hops"]))
def test_each_example_is_in_one_half_and_the_halves_are_of_one_size(ids: list[str], dataset: str) -> None:
    examples = examples_of(ids)
    tuning, held_out = (ids_of(dataset, examples, half) for half in HALVES)
    assert not set(tuning) & set(held_out)
    assert sorted(tuning + held_out) == sorted(ids)
    assert abs(len(tuning) - len(held_out)) <= 1
    assert tuning == [one for one in ids if one in set(tuning)]  # in the dataset's order
    assert ids_of(dataset, examples, None) == ids


@settings(deadline=None)
@given(IDS, st.integers(0, 40))
def test_an_example_stays_in_its_half_whatever_the_limit_is(ids: list[str], limit: int) -> None:
    examples = examples_of(ids)
    for half in HALVES:
        assert ids_of("lookup", examples[:limit], half) == [
            one for one in ids_of("lookup", examples, half) if one in ids[:limit]
        ]


def test_the_hash_decides_and_not_the_place() -> None:
    firsts = {in_half("lookup", examples_of([f"row-{number}", "second"]), "tuning")[0].id for number in range(40)}
    assert "second" in firsts
    assert len(firsts) > 10
    halves = [tuple(ids_of(dataset, examples_of(list("abcdefgh")), "tuning")) for dataset in ("lookup", "hops")]
    assert halves[0] != halves[1]


def test_a_run_takes_its_half(tmp_path) -> None:
    whole = config_of(tmp_path)
    keys = {half: [case.key for case in prepare(replace(whole, limit=4, half=half)).cases] for half in (None, *HALVES)}
    assert {key[0] for half in HALVES for key in keys[half]} == {"lookup", "shots"}
    assert [len(keys[half]) for half in HALVES] == [4, 4]
    assert set(keys["tuning"]) | set(keys["held-out"]) == set(keys[None])
    with pytest.raises(UserError, match="leaves no example of lookup: give limit=2 or more"):
        for half in HALVES:  # a single example lies in one of them
            prepare(replace(whole, dataset={"lookup": True}, limit=1, half=half))


def test_halves_have_folders_of_their_own_and_share_no_table(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = replace(config_of(tmp_path), dataset={"lookup": True}, limit=2, out=None)
    folders = {run(replace(config, half=half), show=False).folder for half in HALVES}
    assert len(folders) == 2
    assert [len(find_runs([folder])[0].records) for folder in folders] == [1, 1]
    with pytest.raises(UserError, match="differ in half"):
        find_runs([tmp_path])
    with pytest.raises(UserError, match=r"holds a run that differs \(half: "):
        run(replace(config, half="tuning", out=str(run(replace(config, half="held-out"), show=False).folder)))
