"""`fetch`: afterwards a run has all that it needs, and each item is reported once."""

from pathlib import Path

from eval import cli
from lazyllm.presets import PRESETS


def test_fetch_names_each_thing_once(capsys) -> None:
    assert cli.main(["fetch", "model=tiny", "dataset=lookup", "-m", "seed=0,1"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"tiny: {PRESETS['tiny'].source}", "lookup: 240 examples"]


def test_fetch_is_refused_offline_in_one_line(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert cli.main(["fetch", "model=qwen3-0.6b", "dataset=hotpotqa"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: Qwen/Qwen3-0.6B: it is not in the hub's cache")
    assert line.endswith(". Fetch it where the hub answers, without HF_HUB_OFFLINE")
    assert cli.main(["fetch", "model=lama2"]) == 2
    assert cli.main(["fetch", "--help"]) == 0
