"""Tuned schedules: written by a search, used by a run, refused if they do not fit the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from eval.run.prepare import prepare
from eval.run.targets import SHIPPED, as_yaml, at_depth, is_tuned, read_tuned
from lazyllm.errors import UserError
from tests.runs import small_run


def written(folder: Path, schedule: dict[int, float], layers: int) -> str:
    (folder / "tuned.yaml").write_text(as_yaml("NAME", schedule, layers, {"model": "a: b # c", "score": [99.5, None]}))
    return f"tuned/{folder}"


def test_tuned_schedule_is_read_from_a_folder_and_a_file(tmp_path: Path) -> None:
    reference = written(tmp_path, {2: 0.3, 5: 0.55}, 8)
    content = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    assert content == {"schedule": {2: 0.3, 5: 0.55}, "layers": 8, "model": "a: b # c", "score": [99.5, None]}
    for name in (reference, f"{reference}/tuned.yaml"):
        assert is_tuned(name)
        assert at_depth({"name": "lazy", "schedule": name}, 8)["schedule"] == {2: 0.3, 5: 0.55}
    assert not is_tuned("paper")
    assert not is_tuned({2: 0.3})


def test_run_with_a_tuned_schedule_is_one_with_its_numbers(tmp_path: Path) -> None:
    reference = written(tmp_path, {2: 0.3, 5: 0.55}, 8)
    plans = []
    for schedule in (reference, {2: 0.3, 5: 0.55}, {2: 0.3, 5: 0.5}):
        plans.append(prepare(small_run(tmp_path / "run", method={"name": "lazy", "schedule": schedule})))
    assert plans[0].identity == plans[1].identity
    assert plans[0].identity["method"]["schedule"] == {"2": 0.3, "5": 0.55}
    assert plans[0].identity != plans[2].identity
    assert plans[0].cases[0].method == plans[1].cases[0].method


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no tuned schedule"),
        ("layers: 8", "KeyError: 'schedule'"),
        ("schedule: [", "cannot be read as a tuned schedule"),
        ("schedule: {2: 1.5}\nlayers: 8", "lies in"),
        ("just words", "cannot be read as a tuned schedule"),
        ("schedule: {8: 0.3, 16: 0.5}\nlayers: 32", r"of 32 layers, but this one has 8: .*\{25%: 0.3, 50%: 0.5\}"),
    ],
)
def test_unusable_tuned_schedules_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "tuned.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_tuned(f"tuned/{tmp_path}", 8)
    with pytest.raises(UserError, match=message):  # before a model loads
        prepare(small_run(tmp_path / "run", method={"name": "lazy", "schedule": f"tuned/{tmp_path}"}))


def test_shipped_schedules_say_how_to_use_them() -> None:
    for file in SHIPPED.glob("*.yaml"):
        assert file.read_text().startswith(f"# python run.py method.schedule=tuned/{file.stem} ")
        content = yaml.safe_load(file.read_text())
        assert read_tuned(f"tuned/{file.stem}", content["layers"]) == content["schedule"]
