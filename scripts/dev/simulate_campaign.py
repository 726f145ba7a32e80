"""Simulated run folders of a campaign, to try collecting, tables and figures at full size.

python -m scripts.dev.simulate_campaign OUT                 2 models, 9 settings, 16 datasets, 5 seeds: 337,500 records
python -m scripts.dev.simulate_campaign OUT --share 0.1     a tenth of each dataset's examples
python -m scripts.dev.simulate_campaign OUT --steps 1 64    answers of 1 to 64 tokens

Numbers are random (seeded), with realistic sizes and spread. Lines and run.json are in the format of
`eval.store.folder`; every run has two shards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eval.benchmarks import longbench
from eval.benchmarks.suite import Dataset
from eval.store.folder import PLANNED, about_text, fingerprint, planned_text
from eval.store.record import Measurement, Record
from eval.store.runs import label_of

# Examples of LongBench's datasets; 200 for all others
_SIZES = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}
MODELS = {"llama2": 3500, "xgen": 7500}  # tokens of the longest prompt
_EXPERIMENT = Path(__file__).parents[2] / "eval" / "conf" / "experiment" / "table1.yaml"
_TABLE1 = {method["name"]: method for method in yaml.safe_load(_EXPERIMENT.read_text())["compare"].values()}
_STUDIED = "lazy"
_LAZY = {"name": _STUDIED, "prune_generated": False, "revive": True}
SETTINGS: tuple[dict[str, Any], ...] = (
    *(_LAZY | {"schedule": schedule} for schedule in ("table1", "1.5x", "2.0x", "paper", {"8": 0.5}, {"16": 0.3})),
    *(settings for name, settings in _TABLE1.items() if name != _STUDIED),
)
_WORDS = np.array([f"word{number}" for number in range(40)])
_SHARDS = 2


def write_campaign(
    out: Path, share: float = 1.0, seeds: int = 5, steps: Sequence[int] = (64, 64), settings: int = len(SETTINGS)
) -> int:
    """Write every run's folder in `out`; returns the number of records.

    share: of each dataset's examples, at least two. steps: least and greatest number of generated tokens. settings:
    their number.
    """
    sizes = {dataset.name: max(2, round(share * _SIZES.get(dataset.name, 200))) for dataset in longbench.DATASETS}
    runs = [(model, number, seed) for model in MODELS for number in range(settings) for seed in range(seeds)]
    for model, number, seed in runs:
        _write_run(out, model, number, seed, sizes, steps)
    return len(runs) * sum(sizes.values())


def _write_run(out: Path, model: str, number: int, seed: int, sizes: dict[str, int], steps: Sequence[int]) -> None:
    settings = SETTINGS[number]
    identity = {
        "model": model, "method": settings | ({"seed": seed} if "seed" in settings else {}), "seed": seed,
        "paired": True, "warmup": 5, "code": "simulated", "load_format": "auto",
        "data": dict.fromkeys(sizes, "simulated"),
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
    (folder / PLANNED).write_text(
        planned_text((name, _id(name, n)) for name, size in sizes.items() for n in range(size))
    )
    lines: list[list[str]] = [[] for _ in range(_SHARDS)]
    for place, dataset in enumerate(longbench.DATASETS):
        rng = np.random.default_rng([seed, number, place, list(MODELS).index(model)])
        longest = MODELS[model]
        # the same lengths in every run
        lengths = np.random.default_rng([longest, place]).lognormal(8.4, 0.6, sizes[dataset.name]).astype(int) + 200
        for example, tokens in enumerate(np.minimum(longest, lengths).tolist()):
            record = _record(rng, settings, dataset, example, tokens, int(rng.integers(steps[0], steps[1] + 1)))
            lines[example % _SHARDS].append(f"{record.to_json()}\n")
    for shard, of_shard in enumerate(lines, start=1):
        (folder / f"records-{shard}-of-{_SHARDS}.jsonl").write_text("".join(of_shard))


def _id(dataset: str, number: int) -> str:
    return f"{dataset}{number:044d}"


def _record(
    rng: np.random.Generator, settings: dict[str, Any], dataset: Dataset, example: int, tokens: int, steps: int
) -> Record:
    ttft_s = tokens * 3e-4 * float(rng.lognormal(0, 0.05))
    speedup = 1 + len(label_of(settings["name"], settings)) % 5 / 3
    starts, kept = ([1, 10, 20, 29], [1.0, 0.7, 0.5, 0.35]) if settings["name"] == _STUDIED else ([1, 3], [1.0, 0.5])
    grown = np.minimum(1, np.array(kept) + np.linspace(0, 0.2, steps)[:, None] * rng.random())
    return Record(
        dataset=dataset.name,
        id=_id(dataset.name, example),
        prompt_sha256=f"{example:064x}",
        prompt_tokens=tokens,
        prompt_tokens_before_truncation=tokens * 2,
        method=_measurement(rng, dataset, ttft_s / speedup, starts, (grown * tokens).astype(int)),
        baseline=_measurement(rng, dataset, ttft_s, [1], np.full((steps, 1), tokens)),
        prompt_end=" ".join(np.roll(np.tile(_WORDS, 7), example))[-600:],
        answers=[" ".join(np.roll(_WORDS, example)[:6])],
    )


def _measurement(
    rng: np.random.Generator, dataset: Dataset, ttft_s: float, starts: list[int], computed: np.ndarray
) -> Measurement:
    steps = len(computed)
    decode_step_s = (0.02 * rng.lognormal(0, 0.1, steps - 1)).tolist()
    score = float(rng.beta(0.6, 1.2))
    return Measurement(
        text=" ".join(rng.choice(_WORDS, steps)),
        token_ids=rng.integers(3, 32_000, steps).tolist(),
        score=score,
        rouge_l=score * 0.9 if dataset.metric == "rouge" else None,
        ttft_s=ttft_s,
        scoring_s=0.0,
        total_s=ttft_s + sum(decode_step_s),
        decode_step_s=decode_step_s,
        pct_prompt_tokens_computed=float(100 * computed[-1].mean() / computed[0, 0]),
        group_starts=starts,
        computed=computed.tolist(),
        kv_bytes=int(computed[-1].sum()) * 16_384,
        aux_bytes=int(computed[0, 0]) * 8_192,
        peak_memory_bytes=14_000_000_000 + int(computed[0, 0]) * 500_000,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--share", type=float, default=1.0, help="of each dataset's examples (default: all)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=(64, 64),
        metavar=("FEWEST", "MOST"),
        help="generated tokens (default: 64)",
    )
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True)
    records = write_campaign(**vars(options))
    size = sum(file.stat().st_size for file in options.out.rglob("*.jsonl"))
    print(f"{records} records, {size / 1e9:.2f} GB in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
