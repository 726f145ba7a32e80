"""`fetch`: afterwards a run has all that it needs, and each item is reported once."""

from eval import cli
from lazyllm.presets import PRESETS


def test_fetch_names_each_thing_once(capsys) -> None:
    assert cli.main(["fetch", "model=tiny", "dataset=lookup", "-m", "seed=0,1"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"tiny: {PRESETS['tiny'].source}", "lookup: 240 examples"]
