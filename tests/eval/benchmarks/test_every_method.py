"""Real rows of LongBench and official rows of RULER through every method, as a run measures them."""

from pathlib import Path

import pytest

from eval.benchmarks import SUITES
from eval.store.folder import read_visits
from lazyllm.methods import METHODS
from tests.eval import official
from tests.runs import measure, run_of

# With settings where they keep short prompts whole by default, and LazyLLM's other ways
ARMS = {name: f"{{name:{name}}}" for name in METHODS if name != "baseline"} | {
    "asl": "{name:asl,first:1,threshold:2.0,keep:64,window:4,layers:2}",
    "gemfilter": "{name:gemfilter,keep:0.5}",
    "prompt_compression": "{name:prompt_compression,keep:0.5,unit:token}",
    "promptdistill": "{name:promptdistill,keep:0.5}",
    "uniprefill": "{name:uniprefill,layers:[1,3],p:0.5}",
    "lazy and generated tokens": "{name:lazy,prune_generated:true}",
    "lazy without revival": "{name:lazy,revive:false}",
}
LONGBENCH = [dataset.name for dataset in SUITES["longbench"].datasets]
RULER = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]  # those of the shared rows


@pytest.mark.slow
@official.needs(official.LONGBENCH)
@official.needs(official.RULER)
@pytest.mark.parametrize(
    ("names", "folder", "settings"),
    [
        (LONGBENCH, "longbench", []),
        (RULER, "ruler/rows", ["data.length=2048", *(f"dataset.{name}.truncate=true" for name in RULER)]),
    ],
    ids=["longbench", "ruler"],
)
def test_every_method_measures_every_row(tmp_path: Path, names: list[str], folder: str, settings: list[str]) -> None:
    arms = ",".join(f"{label}:{settings}" for label, settings in ARMS.items())
    data = [f"dataset=[{','.join(names)}]", f"data.dir={official.SHARED / folder}", *settings, "limit=1"]
    run = ["model=tiny", "model.max_prompt_tokens=1000", "max_new_tokens=3", "warmup=0", f"compare={{{arms}}}"]
    measure(run_of(*run, *data, f"out={tmp_path / 'run'}"), show=False)
    visits = read_visits(tmp_path / "run")
    assert [visit.dataset for visit in visits] == names
    for visit in visits:
        assert not visit.failures
        assert set(visit.answers) == {"baseline", *ARMS}
        for label, answer in visit.answers.items():
            assert 1 <= len(answer.token_ids) <= 3
            keeps_all = label in ("baseline", "trianglemix")  # which skips attention, not tokens
            assert (answer.computed[0][-1] < visit.prompt_tokens) != keeps_all, label
