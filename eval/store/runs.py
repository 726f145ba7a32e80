"""Stored runs, their arms and their answers, as read from run folders.

A *setting* is a method with its hyperparameters but without its seed; an arm is one setting with
one seed.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.benchmarks.datasets import DATASETS, format_value
from eval.store.folder import read_about, read_jobs, read_planned, read_visits
from eval.store.record import Visit
from lazyllm.errors import UserError
from lazyllm.machine import LONG, machine_warnings
from lazyllm.methods import Lazy, Method, by_name, settings_of

if TYPE_CHECKING:
    import pandas as pd

SLOW = 2  # times the TTFT of as many FLOPs: other work makes it so

# LazyLLM's switches
_USUAL = {name: value for name, value in settings_of(Lazy).items() if isinstance(value, bool)}


@dataclass(frozen=True)
class StoredArm:
    """An arm of a stored run.

    name: its label in the run. values: its speedup and hyperparameters, without the seed.
    """

    name: str
    method: str
    values: dict[str, Any]
    seed: int
    is_baseline: bool

    @property
    def settings(self) -> str:
        """The values as JSON that is equal for equal settings."""
        return canonical_json(self.values)

    @property
    def speedup(self) -> float | str | None:
        """The ideal TTFT speedup that it was solved for; "table1" for the paper's; None for
        none.
        """
        return self.values.get("speedup")

    @property
    def label(self) -> str:
        """The setting, as shown."""
        return label_of(self.method, self.values)


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run: run.json's content, and its visits, which are read on first use.

    given: the visits, if they are in memory already.
    """

    folder: Path
    about: dict[str, Any]
    given: Sequence[Visit] | None = None

    @cached_property
    def visits(self) -> list[Visit]:
        """Every visit, in order. Raises UserError."""
        return read_visits(self.folder) if self.given is None else list(self.given)

    @cached_property
    def arms(self) -> dict[str, StoredArm]:
        """{label: arm}, in the order of tables."""
        arms, usual_seed = {}, self.identity["seed"]
        for name, arm in self.identity["arms"].items():
            method, is_baseline = arm["method"], name == self.identity["baseline"]
            values, seed = settings_of_arm(arm), method.get("seed", usual_seed)
            arms[name] = StoredArm(name, method["name"], values, seed, is_baseline)
        return arms

    @cached_property
    def rows(self) -> pd.DataFrame:
        """`eval.store.frame.frame_visits` of it. Raises UserError."""
        from eval.store.frame import frame_visits  # not at the top: pandas is slow to import

        return frame_visits(
            self.visits,
            self.arms,
            model=self.model,
            paper_model=self.paper_model,
            folder=str(self.folder),
            run=self.about["fingerprint"],
        )

    @cached_property
    def answered(self) -> dict[tuple[str, str], set[str]]:
        """{(dataset, id) of each example that any arm has answered: the labels of these arms},
        in order.
        """
        answered: dict[tuple[str, str], set[str]] = {}
        for visit in self.visits:
            if visit.answers:
                answered.setdefault(visit.key, set()).update(visit.answers)
        return answered

    @property
    def done(self) -> set[tuple[str, str]]:
        """(dataset, id) of each example that every arm has answered."""
        return {key for key, arms in self.answered.items() if arms >= self.arms.keys()}

    @property
    def datasets(self) -> list[str]:
        """Datasets with answers, in order."""
        return list(dict.fromkeys(dataset for dataset, _ in self.answered))

    @property
    def failed(self) -> dict[tuple[str, str, str], str]:
        """{(dataset, id, arm): why} of the arms that have not answered in any visit, as the last
        try failed.
        """
        return {
            (*visit.key, arm): why.error
            for visit in self.visits
            for arm, why in visit.failures.items()
            if arm not in self.answered.get(visit.key, ())
        }

    @property
    def failures(self) -> str:
        """How many answers are missing, as all tries failed, and why the first; "" for none."""
        if not (failed := self.failed):
            return ""
        (dataset, example, arm), reason = next(iter(failed.items()))
        return (
            f"{counted(len(failed), 'answer')} failed and {'is' if len(failed) == 1 else 'are'} "
            f"not in the table, the first of {arm} on {dataset}, row {example}: {reason}. "
            f"{self.folder} holds all; the same command tries them again"
        )

    @cached_property
    def planned(self) -> list[tuple[str, str]] | None:
        """`read_planned`."""
        return read_planned(self.folder)

    @property
    def unvisited(self) -> set[tuple[str, str]]:
        """(suite, task) of each example that was planned and has no visit."""
        visited = {visit.key for visit in self.visits}
        names = {name for name, example in self.planned or () if (name, example) not in visited}
        return {(DATASETS[name].suite, DATASETS[name].task) for name in names}

    def check(self) -> None:
        """Read all files but traces. Raises UserError, KeyError or TypeError for damage."""
        read_jobs(self.folder)
        _ = self.planned, self.visits, self.arms, self.model, self.paper_model

    @property
    def unfinished(self) -> str:
        """`lacking` of all arms and datasets."""
        return self.lacking(self.arms)

    def lacking(self, labels: Iterable[str], datasets: Container[str] | None = None) -> str:
        """`4 of 120 examples`, if one of these arms lacks an answer to one that was planned; else
        "".

        datasets: of the examples; None for all.
        """
        planned = [key for key in self.planned or () if datasets is None or key[0] in datasets]
        done = sum(self.answered.get(key, set()) >= {*labels} for key in planned)
        return "" if done == len(planned) else f"{done} of {counted(len(planned), 'example')}"

    @property
    def identity(self) -> dict[str, Any]:
        return self.about["identity"]

    @property
    def model(self) -> str:
        """A preset, or the last part of a folder or hub id; a GGUF file's name has its
        quantisation.
        """
        if self.identity.get("gguf") is not None:
            return self.identity["model"]
        return Path(self.about["config"]["model"]["name"]).name

    @property
    def methods(self) -> list[str]:
        """The names of its methods but the baseline's, each once."""
        return list(dict.fromkeys(arm.method for arm in self.arms.values() if not arm.is_baseline))

    @property
    def paper_model(self) -> str | None:
        """The model's column in the paper's tables: llama2, xgen or None."""
        return self.about["config"]["model"]["paper"]

    @property
    def started(self) -> str:
        """When the run's first job began; "" if that is not stored."""
        return str((self.about.get("provenance") or {}).get("started", ""))

    @property
    def device(self) -> str:
        """The name of the accelerator or processor; "" if it is not stored."""
        return str(((self.about.get("provenance") or {}).get("machine") or {}).get("device", ""))

    @cached_property
    def kernels(self) -> list[str]:
        """The attention kernels of the baseline (`Visit.kernel`); usually one."""
        return sorted({visit.kernel for visit in self.visits if visit.kernel is not None})

    @property
    def warnings(self) -> list[str]:
        """What the run noted, slow answers, and the `machine_warnings` of its baseline."""
        baseline_rows: Any = self.rows[self.rows["arm"] == self.identity["baseline"]]
        long: Any = baseline_rows[baseline_rows["prompt_tokens"] >= LONG]
        # each token takes 2 FLOPs for each weight, which in 16 bits has 2 bytes
        weights = (baseline_rows["prefill_flops"] / baseline_rows["prompt_tokens"]).min()
        numbers = (
            float(long["prefill_mfu"].min()),
            self.identity.get("dtype"),
            float(baseline_rows["step_s"].median()),
        )
        return [
            *self.about.get("cautions", []),
            *filter(None, [self._slowed]),
            *machine_warnings(self.device, self.kernels, *numbers, float(weights)),
        ]

    @property
    def _slowed(self) -> str:
        """Say how many prefills took far longer than one of as many FLOPs; "" if none did."""
        rows: Any = self.rows.sort_values("prefill_flops", ascending=False, kind="stable")
        slow = (rows["ttft_s"] > SLOW * rows.groupby("arm")["ttft_s"].cummin()).sum()
        if not slow:
            return ""
        return (
            f"{slow} of {len(rows)} TTFTs are more than {SLOW} times that of an arm's longer "
            "prompt: other work slowed them (out=FOLDER measures anew)"
        )

    @property
    def traces(self) -> list[Path]:
        """Files with a `Trace`, one for each traced example and arm."""
        return sorted(
            file
            for end in ("json", "json.gz")
            for file in (self.folder / "traces").glob(f"*.{end}")
        )


@cache
def kind_of(name: str) -> type[Method] | None:
    """The method's class; None if its package is not installed."""
    try:
        return by_name(name)
    except UserError:
        return None


def settings_of_arm(about: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an arm in an identity: its speedup, if it was solved for one, and its
    hyperparameters.
    """
    method = {key: value for key, value in about["method"].items() if key not in ("name", "seed")}
    return method if about.get("speedup") is None else {"speedup": about["speedup"], **method}


def canonical_json(settings: Mapping[str, Any]) -> str:
    """Settings as text that is equal for equal settings."""
    return json.dumps(settings, sort_keys=True)


def label_of(method: str, settings: Mapping[str, Any]) -> str:
    """A setting as shown: `lazy, speedup=1.5x`, without null."""
    parts = [f"{key}={_format(key, value)}" for key, value in settings.items() if value is not None]
    return ", ".join([method, *parts])


def _format(key: str, value: Any) -> str:
    is_speedup = key == "speedup" and isinstance(value, float | int)
    return f"{value:g}x" if is_speedup else format_value(value)


def is_ablation(settings: Mapping[str, Any]) -> bool:
    """Whether LazyLLM runs without revival, or prunes generated tokens too."""
    return any(settings.get(key, usual) != usual for key, usual in _USUAL.items())


def counted(number: int, noun: str) -> str:
    """`1 run`, `2,000 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """The folders of all runs in these and their subfolders, by name. Raises UserError."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no such folder; give the folder of the runs, as written by python "
                "run.py"
            )
    found = {
        file.parent
        for folder in folders
        for file in folder.rglob("run.json")
        if ".partial/" not in str(file)
    }
    return sorted(found)


def stored_runs(folders: Sequence[Path]) -> list[StoredRun]:
    """All runs in the folders and their subfolders, by name, also without visits. Raises
    UserError.
    """
    return [StoredRun(folder, read_about(folder / "run.json")) for folder in run_folders(folders)]
