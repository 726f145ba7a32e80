"""A user's first day with a checkpoint, and the next one without a network, against a stand-in for
the hub.

The client and LongBench's rows and templates are the real ones; the checkpoints have the files of
Llama 2 7B and XGen 7B. Two processes run all commands, as a user would in one shell, because
starting one takes seconds.
"""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks import longbench
from eval.store.folder import read_visits
from eval.store.record import Visit
from lazyllm.models.xgen_tokenizer import GPT2
from tests.conftest import ROOT
from tests.hub_server import HubServer, Repository
from tests.stand_in_checkpoints import llama2, xgen

pytestmark = pytest.mark.slow

LLAMA2, XGEN = "meta-llama/Llama-2-7b-chat-hf", "Salesforce/xgen-7b-8k-inst"
TOKEN = "hf_of_a_reader"
SHORT = ["dataset=hotpotqa", "model.max_prompt_tokens=600", "warmup=1"]
CARD = ["dataset=all", "model.max_prompt_tokens=400", "warmup=0", "limit=1", "max_new_tokens=4"]
CARD += ["arms.3.seeds=1"]
FIRST = ["run", "model=llama2", "method=lazy", *SHORT]
# {step: (token to log in with, command)}
DOCTOR = {"doctor": ("", ["doctor"])}  # which keeps its process offline
DAY_ONE = {
    "no token": ("", ["fetch", *FIRST[1:]]),
    "no access": ("hf_of_a_stranger", [*FIRST, "limit=1"]),
    "fetch": (TOKEN, ["fetch", *FIRST[1:]]),
    "first look": ("", [*FIRST, "limit=1"]),
    "more": ("", [*FIRST, "limit=2"]),
    "fetch xgen": ("", ["fetch", "model=xgen", "dataset=hotpotqa"]),
    "card": ("", ["run", "-m", "experiment=table1", "model=llama2,xgen", *CARD]),
    "paper": (
        "",
        ["paper", "runs", "--where", "label=table1", "--out", "card", "--formats", "md", "html"],
    ),
}
DAY_TWO = {
    "doctor again": ("", ["doctor"]),
    "the same": ("", [*FIRST, "limit=2"]),
    "both models": ("", ["run", "-m", "experiment=table2", "model=llama2,xgen", *SHORT, "limit=1"]),
    "never fetched": ("", ["run", "model=llama2-base", *SHORT, "limit=1"]),
}
REFUSED = ("no token", "no access", "never fetched")
PLAY = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from eval.benchmarks import longbench
from eval.cli import main
constants, steps = json.load(sys.stdin)
vars(longbench).update(constants)
played = {}
for name, (token, command) in steps.items():
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        if token:
            from huggingface_hub import login
            login(token)
        code = main(command)
    played[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
json.dump(played, sys.stdout)
"""


@dataclass(frozen=True)
class Played:
    """The output of both days' commands by step, the requests to the hub, and the folder with
    their runs.
    """

    steps: dict[str, dict[str, Any]]
    hub: HubServer
    folder: Path

    def visits(self, model: str, method: str) -> list[Visit]:
        """Of the longest run."""
        return max(
            (read_visits(folder) for folder in (self.folder / "runs").glob(f"{model}-{method}-*")),
            key=len,
        )


@pytest.fixture(scope="module")
def played(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("first_run")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        for dataset in longbench.DATASETS:
            opened.write(
                shared / "longbench" / f"{dataset.name}.jsonl", f"data/{dataset.name}.jsonl"
            )
    first = rows_of(shared)[0]["answers"][0]
    readers = frozenset({TOKEN})
    vocabulary = shared / "tokenizers" / "llama2" / "tokenizer.model"
    repositories = {
        LLAMA2: Repository(llama2(vocabulary, first), gated=readers),
        XGEN: Repository(xgen([50, 60])),
        GPT2: Repository(
            {"merges.txt": (shared / "tokenizers" / "gpt2" / "merges.txt").read_bytes()}
        ),
        longbench.HUB_REPOSITORY: Repository(
            {longbench.HUB_FILE: packed.getvalue()}, kind="datasets", commit=longbench.HUB_REVISION
        ),
    }
    config = shared / "longbench" / "config"
    hub = HubServer(
        repositories,
        {f"/github/{name}": (config / name).read_bytes() for name in longbench.CONFIG_SHA256},
    )
    sha256 = hashlib.sha256(packed.getvalue()).hexdigest()
    constants = {"CONFIG_URL": f"{hub.url}/github/", "HUB_SHA256": sha256}

    def play(steps: dict[str, tuple[str, list[str]]], **env: str) -> dict[str, dict[str, Any]]:
        inherited = {
            key: text for key, text in os.environ.items() if not key.startswith(("HF_", "HUGGING"))
        }
        caches = {
            "HF_HOME": str(folder / "hf"),
            "LAZYLLM_BENCH_CACHE": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, "-c", PLAY], input=json.dumps([constants, steps]), capture_output=True,
            text=True,
            cwd=folder,
            env=inherited | caches | {"HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1"} | env,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    day_one = play(DOCTOR) | play(DAY_ONE)
    hub.close()
    return Played(day_one | play(DAY_TWO, HF_HUB_OFFLINE="1"), hub, folder)


def rows_of(shared: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (shared / "longbench" / "hotpotqa.jsonl").read_bytes().splitlines()
    ]


@pytest.mark.parametrize("step", ["no token", "no access"])
def test_gated_checkpoint_is_refused_in_a_line_with_its_page_and_the_command(
    played: Played, step: str
) -> None:
    refused = played.steps[step]
    assert (refused["code"], refused["out"]) == (2, "")
    (line,) = [line for line in refused["err"].splitlines() if "error" in line]
    assert line.startswith(
        f"error: {LLAMA2}: gated: ask for access at https://huggingface.co/{LLAMA2}"
    )
    assert "`hf auth login`" in line


def test_no_other_command_fails_or_is_noisy(played: Played) -> None:
    for name, step in played.steps.items():
        assert name.startswith("doctor") or step["code"] == (2 if name in REFUSED else 0), step[
            "err"
        ]
        assert "Traceback" not in step["err"]
        assert "HTTP Request" not in step["err"]
    assert "llama2" in (played.folder / "card" / "index.html").read_text(encoding="utf-8")


def test_doctor_names_what_is_missing_until_it_is_there(played: Played) -> None:
    for step, token, rows in (("doctor", "missing", "missing"), ("doctor again", "ok", "ok")):
        lines = [line.split() for line in played.steps[step]["out"].splitlines() if line.strip()]
        states = {line[0]: line[1] for line in lines if len(line) > 1}
        assert (states["token"], states["rows"]) == (token, rows)
    assert "hf auth login" in played.steps["doctor"]["out"]
    assert "lazyllm-bench fetch dataset=all" in played.steps["doctor"]["out"]


def test_fetch_names_what_it_fetched(played: Played) -> None:
    checkpoint, rows = played.steps["fetch"]["out"].splitlines()
    assert re.fullmatch(
        r"llama2: .*/models--meta-llama--Llama-2-7b-chat-hf/snapshots/[0-9a-f]{40}", checkpoint
    )
    assert rows == "hotpotqa: 6 examples"


def test_llama2_answers_real_rows_in_official_prompts(played: Played, shared: Path) -> None:
    """The answer is the first row's gold one, whatever is asked. sentencepiece itself makes the
    expected tokens.
    """
    import sentencepiece

    vocabulary = shared / "tokenizers" / "llama2" / "tokenizer.model"
    pieces: Any = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))
    template = json.loads((shared / "longbench" / "config" / longbench.PROMPTS).read_bytes())[
        "hotpotqa"
    ]
    answer = [*pieces.encode(rows_of(shared)[0]["answers"][0]), 2]
    visits = played.visits("llama2", "lazy")
    for visit, row, score in zip(visits, rows_of(shared)[:2], [1, 0], strict=True):
        ids = [1, *pieces.encode(template.format(context=row["context"], input=row["input"]))]
        assert len(ids) > 600
        prompt = [
            1,
            *pieces.encode(f"[INST]{pieces.decode(ids[:300])}{pieces.decode(ids[-300:])}[/INST]"),
        ]
        assert (
            visit.prompt_sha256 == hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()
        )
        assert list(visit.answers) == ["baseline", "lazy"]
        for side in visit.answers.values():
            assert (side.token_ids, side.score) == (answer, score)


def test_a_run_is_resumed(played: Played) -> None:
    assert "1 example, 0 of them already measured" in played.steps["first look"]["err"]
    assert "2 examples, 1 of them already measured" in played.steps["more"]["err"]


def test_each_file_is_fetched_once_and_no_pickle_at_all(played: Played) -> None:
    paths = [path for _, path in played.hub.requests]
    first_of_xgen = next(number for number, path in enumerate(paths) if "xgen" in path)
    # after the fetch, runs of Llama 2 asked for nothing
    assert paths[first_of_xgen - 1].startswith("/github/")
    fetched = [
        path for method, path in played.hub.requests if method == "GET" and "/resolve/" in path
    ]
    assert len(fetched) == len({*fetched})
    assert sum(path.endswith("config.json") and "generation" not in path for path in fetched) >= 2
    unwanted = [path for path in paths if path.endswith((".bin", ".pth", "README.md"))]
    assert all("xgen" in path for path in unwanted)  # only its weights come as pickles


def test_next_day_sweeps_over_both_models_of_the_paper_end_in_one_table(played: Played) -> None:
    """XGen's weights are pickles on the hub, which are found offline."""
    checkpoint, _ = played.steps["fetch xgen"]["out"].splitlines()
    assert re.fullmatch(
        r"xgen: .*/models--Salesforce--xgen-7b-8k-inst/snapshots/[0-9a-f]{40}", checkpoint
    )
    joint = played.steps["both models"]["out"].partition("All runs of the sweep")[2]
    assert "llama2" in joint
    assert "xgen" in joint
    [llama2], [visit] = played.visits("llama2", "table2"), played.visits("xgen", "table2")
    assert llama2.answers.keys() == visit.answers.keys() == {"baseline", "lazy"}
    assert visit.answers["lazy"].token_ids == [50, 60, 50256]


def test_next_day_resumes_without_a_network(played: Played) -> None:
    same = played.steps["the same"]
    assert "2 examples, 2 of them already measured" in same["err"]
    assert "loading llama2" not in same["err"]
    assert same["out"] == played.steps["more"]["out"]
    assert (
        "error: meta-llama/Llama-2-7b-hf: it is not in the hub's cache"
        in played.steps["never fetched"]["err"]
    )


def test_the_papers_card_is_played_on_all_sixteen_datasets(played: Played) -> None:
    """Table 1 on both models, to the table as the paper prints it and to its claims."""
    assert (played.steps["card"]["code"], played.steps["paper"]["code"]) == (0, 0)
    tables = played.folder / "card" / "tables"
    lines = [
        line.split("|")[1:-1]
        for line in (tables / "table1_paper.md").read_text().splitlines()
        if "|" in line
    ]
    names, rows = [name.strip() for name in lines[0]], lines[2:]
    assert len(rows) == 30
    for row in rows:
        cells = {name: cell.strip() for name, cell in zip(names, row, strict=True)}
        for model in ("Llama 2 7B", "XGen 7B"):
            assert int(cells[f"{model}: n"]) in (2, 3)  # the datasets of a task
            for value in ("score", "TTFT speedup"):
                assert re.fullmatch(r"[\d.]+\* \([\d.]+\)", cells[f"{model}: {value}"])
    claims = [
        line.split("|")[1:-1]
        for line in (tables / "verdicts.md").read_text().splitlines()
        if "|" in line
    ][2:]
    judged = {
        (row[0].strip(), row[-1].strip()): row[-2].strip()
        for row in claims
        if row[-1].strip() == "table1"
    }
    assert {model for model, _ in judged} == {"llama2", "xgen"}
    assert "not run" not in judged.values()
