"""All methods on a virtual GPU: devices never mix, waits are as documented, attention runs on fused
backends.

What a real GPU alone can show (rounding, the kernels' own errors, times) is in `tests/test_cuda.py`
and `experiment=speed`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.lazyllm.methods.method_matrix import LISTED
from tests.virtual_card import METHODS, MUTATIONS, TOOL

LAYERS = 4
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not TOOL.is_file(),
        reason=f"the stand-in for a GPU is not here: {TOOL.name} beside the repository",
    ),
]


@cache
def seen() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.virtual_card"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found["selftest"] == []  # the stand-in itself can fail
    return found


def parts() -> dict[str, dict[str, Any]]:
    """{method: its parts}, of all that ran."""
    methods = seen()["methods"]
    assert {name: said for name, said in methods.items() if isinstance(said, str)} == {}
    return methods


def test_every_method_answers_as_on_the_cpu_and_mixes_no_devices() -> None:
    assert {name.split(": ")[1] for name in parts()} == METHODS.keys()


def test_commands_run_on_the_card() -> None:
    assert {command: said for command, said in seen()["commands"].items() if said} == {}


def documented() -> dict[str, list[str]]:
    """{method: its cells} of the table in docs/exactness.md."""
    text = (
        (ROOT / "docs" / "exactness.md")
        .read_text(encoding="utf-8")
        .split("## Waits on a GPU")[1]
        .split("##")[0]
    )
    rows: dict[str, list[str]] = {}
    for line in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE):
        names, *cells = line.split(" | ")
        for name in names.split(", "):
            rows[
                name.replace("`", "")
                .replace(" with revive=false", ", without revival")
                .replace(" with", ",")
            ] = cells
    return rows


def waits_and_most(name: str, found: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """The most waits in `found`, and the most that the table allows: before the prefill, in it,
    and in a step.
    """
    rows, boundaries = documented(), LISTED[name].asks
    cells = rows.get(name) or rows[name.split(",")[0]]
    for cell, prefix in zip(cells, ("start", "prefill", "step"), strict=True):
        number, _, unit = cell.partition(" a ")
        counts = [
            sum(part["waits"].values()) for label, part in found.items() if label.startswith(prefix)
        ]
        yield max(counts), int(number) * {"": 1, "boundary": boundaries, "layer": LAYERS}[unit]


@pytest.mark.parametrize("name", METHODS)
def test_waits_are_those_of_the_documents(name: str) -> None:
    for waits, most in waits_and_most(name, parts()[f"llama, bfloat16: {name}"]):
        assert waits <= most
        assert (waits > 0) == (most > 0)


def test_attention_runs_on_fused_backends_and_cudnn_in_prefills_only() -> None:
    for name, found in parts().items():
        for label, part in found.items():
            calls = " ".join(part["attention"])
            assert "math" not in calls
            if label != "start":  # which may run another model, its prefill and its steps
                assert ("cudnn" in calls) == (label == "prefill" and "bfloat16" in name)
            # only LazyLLM attends to a part of what is stored
            revives = label.startswith("step") and ": lazy" in name and "revival" not in name
            assert ("mask" in calls) == revives


def test_few_queries_over_many_keys_run_in_chunks_without_another_wait() -> None:
    """At "lazyllm.engine.kernels.CHUNK_KEYS" = 4: the answers of the CPU, by the kernel for
    masks alone.
    """
    for name, found in seen()["chunks"].items():
        assert not isinstance(found, str), f"{name}: {found}"
        for waits, most in waits_and_most(name.split(": ")[1], found):
            assert waits <= most
        calls = [
            call
            for label, part in found.items()
            if label.startswith("step")
            for call in part["attention"]
        ]
        assert {call.split()[1] for call in calls} <= {"flash", "efficient"}
        assert ("efficient efficient mask, chunks" in calls) == ("revival" not in name)


def test_scores_of_16_bits_use_tensor_cores_and_others_do_not() -> None:
    found = parts()
    for name in ("lazy", "pyramidinfer"):
        assert found[f"llama, bfloat16: {name}"]["prefill"]["scores"] == ["tf32"]
        assert found[f"llama, float32: {name}"]["prefill"]["scores"] == ["none"]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mistakes_are_found(mutation: str) -> None:
    baseline, lazy = (
        seen()["mutations"][mutation][f"llama, bfloat16: {name}"] for name in ("baseline", "lazy")
    )
    if mutation == "wrong_device":
        assert "same device" in baseline
        assert "same device" in lazy
    elif mutation.endswith("in_prefill"):
        assert sum(lazy["prefill"]["waits"].values()) == LISTED["lazy"].asks
    else:
        assert all("mask" in call for call in baseline["step 1"]["attention"])
