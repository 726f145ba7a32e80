"""The registry of suites: unique names for configs and tables, and a cheap import."""

import ast
import subprocess
import sys

from eval.benchmarks import SUITES
from eval.benchmarks.datasets import CHOICES, DATASETS, TASKS
from eval.benchmarks.metrics import METRICS
from eval.config import RunConfig
from tests.conftest import ROOT

# lazyllm/__init__.py is left out: its own imports are not this room's.
IMPORTS = """
import sys, types
sys.modules["lazyllm"] = package = types.ModuleType("lazyllm")
package.__path__ = ["lazyllm"]
import eval.benchmarks.prompts
heavy = {"torch", "transformers", "pandas", "numpy", "datasets", "pyarrow", "hydra"}
heavy |= {"huggingface_hub", "rouge_score"}
print(sorted(heavy & set(sys.modules)))
"""


def test_names_are_unique_and_every_dataset_can_be_scored() -> None:
    datasets = [dataset for suite in SUITES.values() for dataset in suite.datasets]
    assert len(DATASETS) == len(datasets)
    assert all(each.suite == name for name, suite in SUITES.items() for each in suite.datasets)
    metrics = {dataset.metric for dataset in datasets if dataset.name != "random"}  # no score
    # only of rows that a YAML file describes
    assert {*METRICS} - metrics == {"node_f1", "string_match_part", "substring"}


def test_names_of_settings_choose_datasets_tasks_and_suites() -> None:
    tasks = {task for suite in SUITES.values() for task in suite.all_tasks}
    suites = {suite.whole: suite.datasets for suite in SUITES.values()}
    named = {name: (dataset,) for name, dataset in DATASETS.items()}
    assert {name: CHOICES[name] for name in suites | named} == suites | named
    assert CHOICES.keys() == suites.keys() | named.keys() | tasks
    assert tasks <= {*TASKS}
    # a task that two suites have is the first one's, which is the paper's
    assert next(iter(SUITES)) == "longbench"
    shared = {dataset.suite for task in SUITES["embedded"].all_tasks for dataset in CHOICES[task]}
    assert shared == {"longbench"}


def test_settings_of_every_suite_are_in_the_config_under_its_name() -> None:
    for suite in SUITES.values():
        kind = RunConfig.model_fields[suite.name].annotation if suite.options else None
        assert kind is suite.options
        assert not suite.lengths or suite.lengths in suite.options.model_fields


def test_room_imports_nothing_heavy_and_does_not_warn() -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORTS]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "[]\n", "")


def test_no_other_room_compares_the_name_of_a_suite_or_metric() -> None:
    for file in (ROOT / "eval").rglob("*.py"):
        if "benchmarks" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                names = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                known = {*SUITES, "f1", "rouge", "classification"}
                assert not names & known, f"{file}:{node.lineno}"
