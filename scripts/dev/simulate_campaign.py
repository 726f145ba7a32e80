"""Run folders of a campaign that was never run: for trying to collect runs and make tables and figures at full size.

python -m scripts.dev.simulate_campaign OUT                 2 models, 9 settings, 16 datasets, 5 seeds: 337,500 records
python -m scripts.dev.simulate_campaign OUT --share 0.1     a tenth of each dataset's examples
python -m scripts.dev.simulate_campaign OUT --steps 1 64    answers of 1 to 64 tokens

Numbers are drawn from a seed: they have the sizes and the spread of real ones, and mean nothing. Lines and run.json are
those of `eval.store.folder`; every run is in two shards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eval.benchmarks import longbench
from eval.benchmarks.suite import Dataset
from eval.store.folder import about_text, fingerprint
from eval.store.record import Measurement, Record
from eval.store.results import PLANNED, label_of, planned_text

# LongBench's examples by dataset; 200 if it is not named
_SIZES = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}
MODELS = {"llama2": (32, 3500), "xgen": (32, 7500)}  # layers, and the longest prompt
_EXPERIMENT = Path(__file__).parents[2] / "eval" / "conf" / "experiment" / "table1.yaml"
_TABLE1 = {method["name"]: method for method in yaml.safe_load(_EXPERIMENT.read_text())["compare"].values()}
_STUDIED = "lazy"
_LAZY = {"name": _STUDIED, "prune_generated": False, "revive": True}
SETTINGS: tuple[dict[str, Any], ...] = (
    *(_LAZY | {"schedule": schedule} for schedule in ("table1", "1.5x", "2.0x", "paper", {"8": 0.5}, {"16": 0.3})),
    *(settings for name, settings in _TABLE1.items() if name != _STUDIED),
)
_STARTS = [1, 10, 20, 29]  # first layers of LazyLLM's groups
_WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so"
)
_SHARDS = 2


@dataclass(frozen=True)
class Campaign:
    """share: of each dataset's examples, at least two. steps: fewest and most generated tokens."""

    share: float = 1.0
    seeds: int = 5
    steps: tuple[int, int] = (64, 64)
    settings: int = len(SETTINGS)
    models: tuple[str, ...] = tuple(MODELS)


def write_campaign(out: Path, campaign: Campaign) -> int:
    """Write every run's folder below `out`; returns the number of records."""
    records = 0
    for model in campaign.models:
        for number, settings in enumerate(SETTINGS[: campaign.settings]):
            for seed in range(campaign.seeds):
                records += _write_run(out, campaign, model, number, settings, seed)
    return records


def _write_run(out: Path, campaign: Campaign, model: str, number: int, settings: dict[str, Any], seed: int) -> int:
    datasets = longbench.DATASETS
    sizes = {one.name: max(2, round(campaign.share * _SIZES.get(one.name, 200))) for one in datasets}
    method = settings | ({"seed": seed} if "seed" in settings else {})
    identity = {
        "model": model, "method": method, "seed": seed, "paired": True, "warmup": 5, "code": "simulated",
        "load_format": "auto", "data": dict.fromkeys(sizes, "simulated"),
    }  # fmt: skip
    about = {
        "examples": sizes,
        "config": {"model": {"name": model, "paper": model}, "limit": None, "sample": None},
        "provenance": {
            "git_commit": "simulated", "started": "2026-11-21T00:00:00Z", "versions": {"torch": "simulated"},
            "machine": {"device": "simulated"},
        },
    }  # fmt: skip
    folder = out / f"{model}-{settings['name']}-all-{fingerprint(identity)[:8]}"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(about_text(identity, about))
    planned = ((one.name, _id(one, number)) for one in datasets for number in range(sizes[one.name]))
    (folder / PLANNED).write_text(planned_text(planned))
    files = [(folder / f"records-{shard + 1}-of-{_SHARDS}.jsonl").open("w") for shard in range(_SHARDS)]
    for place, dataset in enumerate(datasets):
        rng = np.random.default_rng([seed, number, place, list(MODELS).index(model)])
        for example, record in enumerate(_records(rng, campaign, model, settings, dataset, sizes[dataset.name])):
            files[example % _SHARDS].write(f"{record.to_json()}\n")
    for file in files:
        file.close()
    return sum(sizes.values())


def _id(dataset: Dataset, number: int) -> str:
    return f"{dataset.name}{number:044d}"


def _records(
    rng: np.random.Generator, campaign: Campaign, model: str, settings: dict[str, Any], dataset: Dataset, n: int
) -> Iterator[Record]:
    longest = MODELS[model][1]
    # what belongs to the examples is the same in every run
    own = np.random.default_rng([longest, *dataset.name.encode()])
    lengths = np.minimum(longest, own.lognormal(8.4, 0.6, n).astype(int) + 200)
    words = np.array(_WORDS.split())
    ends = [" ".join(words[own.integers(0, len(words), 150)])[-600:] for _ in range(n)]
    answers = [" ".join(words[own.integers(0, len(words), 6)]) for _ in range(n)]
    speedup = 1 + len(label_of(settings["name"], settings)) % 5 / 3
    for example in range(n):
        tokens = int(lengths[example])
        steps = int(rng.integers(campaign.steps[0], campaign.steps[1] + 1))
        ttft = tokens * 3e-4 * float(rng.lognormal(0, 0.05))
        is_lazy = settings["name"] == _STUDIED
        keep = [1.0, 0.7, 0.5, 0.35] if is_lazy else [1.0, 0.5]
        grown = np.minimum(1, np.array(keep) + np.linspace(0, 0.2, steps)[:, None] * rng.random())
        yield Record(
            dataset=dataset.name,
            id=_id(dataset, example),
            prompt_sha256=f"{example:064x}",
            prompt_tokens=tokens,
            prompt_tokens_before_truncation=tokens * 2,
            method=_measurement(
                rng, words, dataset, steps, ttft / speedup, _STARTS if is_lazy else [1, 3], (grown * tokens).astype(int)
            ),
            baseline=_measurement(rng, words, dataset, steps, ttft, [1], np.full((steps, 1), tokens)),
            prompt_end=ends[example],
            answers=[answers[example]],
        )


def _measurement(
    rng: np.random.Generator, words: np.ndarray, dataset: Dataset, steps: int, ttft: float, starts: list[int],
    computed: np.ndarray,
) -> Measurement:  # fmt: skip
    decoding = (0.02 * rng.lognormal(0, 0.1, steps - 1)).tolist()
    score = float(rng.beta(0.6, 1.2))
    return Measurement(
        text=" ".join(words[rng.integers(0, len(words), steps)]),
        token_ids=rng.integers(3, 32_000, steps).tolist(),
        score=score,
        rouge_l=score * 0.9 if dataset.metric == "rouge" else None,
        ttft_s=ttft,
        scoring_s=0.0,
        total_s=ttft + sum(decoding),
        decode_step_s=decoding,
        pct_prompt_tokens_computed=float(100 * computed[-1].mean() / computed[0, 0]),
        group_starts=starts,
        computed=computed.tolist(),
        kv_bytes=int(computed[-1].sum()) * 16_384,
        aux_bytes=int(computed[0, 0]) * 8_192,
        peak_memory_bytes=14_000_000_000 + int(computed[0, 0]) * 500_000,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--share", type=float, default=1.0, help="of each dataset's examples (default: all)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, nargs=2, default=(64, 64), metavar=("FEWEST", "MOST"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True)
    records = write_campaign(options.out, Campaign(options.share, options.seeds, tuple(options.steps)))
    size = sum(file.stat().st_size for file in options.out.rglob("*.jsonl"))
    print(f"{records} records, {size / 1e9:.2f} GB in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
