"""The registry of suites: unique names for configs and tables, and a cheap import."""

import ast
import subprocess
import sys
from dataclasses import fields

from eval.benchmarks import SUITES
from eval.benchmarks.datasets import CHOICES, DATASETS, TASKS, SuiteSettings
from eval.benchmarks.metrics import METRICS
from tests.conftest import ROOT

# lazyllm/__init__.py is left out: its own imports are not this room's.
IMPORTS = """
import sys, types
sys.modules["lazyllm"] = package = types.ModuleType("lazyllm")
package.__path__ = ["lazyllm"]
import eval.benchmarks.datasets, eval.benchmarks.prompts, eval.benchmarks.subsets, eval.score
heavy = {"torch", "transformers", "pandas", "numpy", "datasets", "pyarrow", "hydra", "huggingface_hub", "rouge_score"}
print(sorted(heavy & set(sys.modules)))
"""


def test_names_are_unique_and_every_dataset_can_be_scored() -> None:
    datasets = [dataset for suite in SUITES.values() for dataset in suite.datasets]
    assert len(DATASETS) == len(datasets)
    assert all(dataset.suite == name for name, suite in SUITES.items() for dataset in suite.datasets)
    metrics = {dataset.metric for dataset in datasets if dataset.name != "random"}  # which has no score
    own = {*METRICS} - metrics  # only of rows that a YAML file describes
    assert own == {"node_f1", "string_match_part", "substring"}
    tasks = {task for suite in SUITES.values() for task in suite.all_tasks}
    whole = {suite.whole: suite.datasets for suite in SUITES.values()}
    named = {name: (dataset,) for name, dataset in DATASETS.items()}
    assert {name: CHOICES[name] for name in (*whole, *named)} == named | whole  # a suite of one may have its name
    assert CHOICES.keys() == whole.keys() | named.keys() | tasks
    assert all(CHOICES.values())
    assert tasks <= {*TASKS}
    # a task that two suites have is the first one's
    assert {dataset.suite for task in SUITES["embedded"].all_tasks for dataset in CHOICES[task]} == {"longbench"}


def test_settings_of_every_suite_are_in_a_config_under_its_name() -> None:
    configured = {item.name: type(getattr(SuiteSettings(), item.name)) for item in fields(SuiteSettings)}
    assert configured == {suite.name: suite.options for suite in SUITES.values() if suite.options is not None}


def test_the_first_suite_is_the_papers() -> None:
    assert [suite.name for suite in SUITES.values() if suite.in_paper] == [next(iter(SUITES))] == ["longbench"]


def test_room_imports_nothing_heavy_and_does_not_warn() -> None:
    shown = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "[]\n", "")


def test_no_other_room_compares_the_name_of_a_suite_or_metric() -> None:
    for file in (ROOT / "eval").rglob("*.py"):
        if "benchmarks" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert not constants & {*SUITES, "f1", "rouge", "classification"}, f"{file}:{node.lineno}"
