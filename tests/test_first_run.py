"""A user's first day with a checkpoint, and the next one without a network, against a stand-in for the hub.

The client, LongBench's rows and templates, and GPT-2's merges are the real ones; the checkpoints have the files of
Llama 2 7B, Llama 3.1 8B and XGen 7B. Two processes run all commands, as starting one takes ten seconds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks import longbench
from eval.store.folder import read_run
from eval.store.record import Record
from lazyllm.models.xgen_tokenizer import GPT2
from tests.hub_server import HubServer, Repository
from tests.lazyllm.models.test_xgen_tokenizer import encoding_of
from tests.stand_in_checkpoints import LLAMA2, LLAMA31, layout, llama2, llama3_tokenizer, llama31, xgen

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("first run")]  # one worker plays both days, once

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "hf_of_a_reader"
COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
SHORT = ["dataset=hotpotqa", "model.max_prompt_tokens=600", "timing.warmup=1"]
FIRST = ["run", "model=llama2", "method=lazy", *SHORT]
LLAMA31_RUN = ["run", "model=custom", "model.name=meta-llama/Llama-3.1-8B-Instruct", "method=lazy", *SHORT]
XGEN_RUN = ["run", "model=xgen", "model.name=xgen-7b", "method=lazy", *SHORT]
DAY_ONE = {
    "doctor": {"command": ["doctor"]},
    "no token": {"command": ["fetch", *FIRST[1:]]},
    "no access": {"log_in": "hf_of_a_stranger", "command": [*FIRST, "limit=1"]},
    "fetch": {"log_in": TOKEN, "command": ["fetch", *FIRST[1:]]},
    "first look": {"command": [*FIRST, "limit=1"]},
    "more": {"command": [*FIRST, "limit=2"]},
    "sweep": {"command": ["run", "-m", "model=llama2", "method=lazy,static_pruning", *SHORT, "limit=2"]},
    "llama 3.1": {"command": [*LLAMA31_RUN, "limit=2"]},
    "xgen": {"command": ["run", "model=xgen", "method=lazy", *SHORT, "limit=1"]},
    "xgen, as told": {"as_told": "xgen-7b", "command": [*XGEN_RUN, "limit=2"]},
    "report": {"command": ["report", "runs"]},
}
DAY_TWO = {
    "doctor again": {"command": ["doctor"]},
    "the same": {"command": [*FIRST, "limit=2"]},
    "more": {"command": [*LLAMA31_RUN, "limit=3"]},
    "more of xgen": {"command": [*XGEN_RUN, "limit=3"]},
    "never fetched": {"command": ["run", "model=llama2-base", *SHORT, "limit=1"]},
}


@dataclass(frozen=True)
class Played:
    """The output of both days' commands, the requests to the hub, and the folder with their runs."""

    day_one: dict[str, dict[str, Any]]
    day_two: dict[str, dict[str, Any]]
    hub: HubServer
    folder: Path

    def records(self, model: str, method: str) -> list[Record]:
        (folder,) = (self.folder / "runs").glob(f"{model}-{method}-*")
        return read_run(folder)[1]


@pytest.fixture(scope="module")
def played(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("first_run")
    hub, constants = _hub(shared)
    day_one = _play(folder, DAY_ONE, constants, HF_ENDPOINT=hub.url)
    hub.close()
    return Played(day_one, _play(folder, DAY_TWO, constants, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1"), hub, folder)


def _hub(shared: Path) -> tuple[HubServer, dict[str, str]]:
    """The hub with both checkpoints and LongBench, and the pinned LongBench constants that differ there."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("data/hotpotqa.jsonl", (shared / "longbench" / "hotpotqa.jsonl").read_bytes())
    answers = [rows["answers"][0] for rows in _rows(shared)]
    readers = frozenset({TOKEN})
    merges = shared / "tokenizers" / "gpt2" / "merges.txt"
    xgen_answer = encoding_of(merges).encode(f" Assistant: {answers[2]}")
    hub = HubServer(
        {
            "meta-llama/Llama-2-7b-chat-hf": Repository(
                llama2(shared / "tokenizers" / "llama2" / "tokenizer.model", answers[0]), gated=readers
            ),
            "meta-llama/Llama-3.1-8B-Instruct": Repository(llama31(answers[1]), gated=readers, commit=COMMIT),
            "Salesforce/xgen-7b-8k-inst": Repository(xgen(xgen_answer)),
            GPT2: Repository({"merges.txt": merges.read_bytes(), "model.safetensors": b"weights that nobody asks for"}),
            longbench.HUB_REPOSITORY: Repository(
                {longbench.HUB_FILE: packed.getvalue()}, kind="datasets", commit=longbench.HUB_REVISION
            ),
        },
        {f"/github/{name}": (shared / "longbench" / "config" / name).read_bytes() for name in longbench.CONFIG_SHA256},
    )
    sha256 = hashlib.sha256(packed.getvalue()).hexdigest()
    return hub, {"CONFIG_URL": f"{hub.url}/github/", "HUB_SHA256": sha256}


def _rows(shared: Path) -> list[dict[str, Any]]:
    lines = (shared / "longbench" / "hotpotqa.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def _play(folder: Path, steps: dict[str, Any], constants: dict[str, str], **env: str) -> dict[str, dict[str, Any]]:
    inherited = {key: text for key, text in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    own = {"HF_HOME": str(folder / "hf"), "LAZYLLM_BENCH_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.play_commands"],
        input=json.dumps({"longbench": constants, "steps": list(steps.values())}),
        capture_output=True,
        text=True,
        cwd=folder,
        env=inherited | own | {"OMP_NUM_THREADS": "1"} | env,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(steps, json.loads(done.stdout), strict=True))


# -------------------------------------------------------------------------------------------------------- the stand-ins


@pytest.mark.parametrize(
    ("published", "shard_size", "file_sizes"),
    [
        (LLAMA2, "10GB", [9_976_576_152, 3_500_296_424]),
        (LLAMA31, "5GB", [4_976_698_672, 4_999_802_720, 4_915_916_176, 1_168_138_808]),
    ],
)
def test_tensors_lie_in_the_shards_that_the_published_files_have_room_for(
    published: dict[str, Any], shard_size: str, file_sizes: list[int]
) -> None:
    """A safetensors file is its tensors and a header of some 115 bytes a tensor."""
    files, sizes = layout(published, shard_size)
    assert list(sizes) == sorted(sizes)
    for (file, size), file_size in zip(sizes.items(), file_sizes, strict=True):
        tensors = list(files.values()).count(file)
        assert 8 + 60 * tensors < file_size - size < 200 + 140 * tensors


# ------------------------------------------------------------------------------------------------------------- day one


@pytest.mark.parametrize("step", ["no token", "no access"])
def test_a_gated_checkpoint_is_refused_in_a_line_with_its_page_and_the_command(played: Played, step: str) -> None:
    refused = played.day_one[step]
    assert (refused["code"], refused["out"]) == (2, "")
    (line,) = [line for line in refused["err"].splitlines() if "error" in line]
    page = "https://huggingface.co/meta-llama/Llama-2-7b-chat-hf"
    assert line.startswith(f"error: meta-llama/Llama-2-7b-chat-hf: gated: ask for access at {page}, then log in with")
    assert "`hf auth login`" in line


def test_no_command_fails_otherwise_or_is_noisy(played: Played) -> None:
    for name, step in (played.day_one | played.day_two).items():
        refused = name in ("no token", "no access", "xgen", "never fetched")
        assert name.startswith("doctor") or step["code"] == (2 if refused else 0), step["err"]
        assert "Traceback" not in step["err"]
        assert "HTTP Request" not in step["err"]


def test_the_doctor_names_what_is_missing_until_it_is_there(played: Played) -> None:
    page = "https://huggingface.co/meta-llama/Llama-2-7b-chat-hf"
    expected = {
        "doctor": {
            "hub": "ok answers",
            "token": "missing hf auth login (gated models need it)",
            "llama2": f"missing meta-llama/Llama-2-7b-chat-hf is gated: ask for access at {page}, then hf auth login",
            "LongBench": "missing not in the cache: lazyllm-bench fetch dataset=all, or give data.dir=FOLDER",
        },
        "doctor again": {
            "hub": "not needed HF_HUB_OFFLINE is set: only the caches are read",
            "token": "ok the hub's client has one",
            "llama2": "ok meta-llama/Llama-2-7b-chat-hf is here",
            "LongBench": "ok in the cache",
        },
    }
    for step, findings in expected.items():
        lines = [" ".join(line.split()) for line in (played.day_one | played.day_two)[step]["out"].splitlines()]
        for thing, finding in findings.items():
            assert f"{thing} {finding}" in lines


def test_what_was_fetched_is_named(played: Played) -> None:
    checkpoint, rows = played.day_one["fetch"]["out"].splitlines()
    assert re.fullmatch(r"llama2: .*/models--meta-llama--Llama-2-7b-chat-hf/snapshots/[0-9a-f]{40}", checkpoint)
    assert rows == "hotpotqa: 6 examples"


def test_llama2_answers_real_rows_in_official_prompts(played: Played, shared: Path) -> None:
    """The answer is the first row's gold one, whatever is asked. sentencepiece itself makes the expected tokens."""
    import sentencepiece

    pieces: Any = sentencepiece.SentencePieceProcessor(
        model_file=str(shared / "tokenizers" / "llama2" / "tokenizer.model")
    )
    prompts = [
        [1, *pieces.encode(f"[INST]{_truncated(text, lambda text: [1, *pieces.encode(text)], pieces.decode)}[/INST]")]
        for text in _rendered(shared)
    ]
    answer = [*pieces.encode(_rows(shared)[0]["answers"][0]), 2]
    _compare(played.records("llama2", "lazy"), prompts[:2], answer, [1, 0])


def test_llama31_begins_once_and_stops_at_its_third_end_token(played: Played, shared: Path) -> None:
    """Its answer is the second row's gold one. `tokenizers` itself makes the expected tokens."""
    gold = _rows(shared)[1]["answers"][0]
    tokenizer = llama3_tokenizer(gold)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    system = f"<|begin_of_text|>{header.format('system')}Today Date: 26 Jul 2024\n\n<|eot_id|>{header.format('user')}"
    prompts = []
    for text in _rendered(shared)[:3]:
        text = _truncated(text, lambda text: tokenizer.encode(text).ids, tokenizer.decode).strip()
        wrapped = f"{system}{text}<|eot_id|>{header.format('assistant')}"
        prompts.append(tokenizer.encode(wrapped, add_special_tokens=False).ids)
    (word,) = tokenizer.encode(gold, add_special_tokens=False).ids
    _compare(played.records("Llama-3.1-8B-Instruct", "lazy"), prompts, [word, 128_009], [0, 1, 0])


def test_pickles_are_refused_with_two_commands_that_make_safetensors_of_them(played: Played) -> None:
    refused = played.day_one["xgen"]
    (line,) = [line for line in refused["err"].splitlines() if "error" in line]
    assert line.startswith("error: Salesforce/xgen-7b-8k-inst: its weights are not safetensors")
    assert "hf download Salesforce/xgen-7b-8k-inst --local-dir FOLDER" in line
    assert (played.folder / "xgen-7b" / "model.safetensors").is_file()


def test_xgen_answers_with_our_tokenizer_of_gpt2s_merges(played: Played, shared: Path) -> None:
    """It answers with the third row's gold answer, after a word that LongBench removes; tiktoken gives the tokens."""
    encoding = encoding_of(shared / "tokenizers" / "gpt2" / "merges.txt")
    header = (shared / "longbench" / "config" / "xgen_header.txt").read_text()
    prompts = [
        encoding.encode(f"{header} ### Human: {_truncated(text, encoding.encode, encoding.decode)}\n###")
        for text in _rendered(shared)[:3]
    ]
    answer = [*encoding.encode(f" Assistant: {_rows(shared)[2]['answers'][0]}"), 50256]
    _compare(played.records("xgen-7b", "lazy"), prompts, answer, [0, 0, 1])


def test_a_sweep_takes_what_is_measured_and_ends_in_one_table(played: Played) -> None:
    assert played.day_one["sweep"]["err"].count("2 examples, 2 of them already measured") == 1
    assert played.day_one["sweep"]["err"].count("2 examples, 0 of them already measured") == 1
    joint = played.day_one["sweep"]["out"].partition("All runs of the sweep")[2]
    assert "lazy" in joint
    assert "static_pruning" in joint
    assert len(played.records("llama2", "static_pruning")) == 2


def test_a_run_goes_on(played: Played) -> None:
    assert "1 examples, 0 of them already measured" in played.day_one["first look"]["err"]
    assert "2 examples, 1 of them already measured" in played.day_one["more"]["err"]


def test_a_run_after_the_fetch_asks_for_nothing(played: Played) -> None:
    """Up to Llama 3.1, which was not fetched: its first run downloads it."""
    asked = [path for _, path in played.hub.asked]
    first_of_llama31 = next(number for number, path in enumerate(asked) if "Llama-3.1" in path)
    assert asked[first_of_llama31 - 1] == f"/github/{longbench.MAX_LENGTHS}"


def test_each_file_is_fetched_once_and_no_pickle_at_all(played: Played) -> None:
    fetched = [path for method, path in played.hub.asked if method == "GET" and not path.startswith("/api/models")]
    weights = [path for path in fetched if path.startswith("/storage/meta-llama")]
    assert len(weights) == len(set(weights)) == 2 + 1 + 4  # shards, and Llama 2's tokenizer.model
    configs = [path for path in fetched if path.endswith("/config.json") and "meta-llama" in path]
    assert len(configs) == len(set(configs)) == 2
    unwanted = [path for _, path in played.hub.asked if path.endswith((".bin", ".pth", "README.md"))]
    assert all("xgen" in path for path in unwanted)  # by the command that the refusal names
    assert played.hub.leaked == []
    # without access twice, then once for all commands of the process
    about = [path for _, path in played.hub.asked if path.endswith("/revision/main") and "meta-llama" in path]
    assert [path.split("/")[4] for path in about] == 3 * ["Llama-2-7b-chat-hf"] + ["Llama-3.1-8B-Instruct"]


def test_the_report_shows_all_models(played: Played) -> None:
    page = (played.folder / "runs" / "report.html").read_text(encoding="utf-8")
    assert "llama2" in page
    assert "Llama-3.1-8B-Instruct" in page
    assert "xgen-7b" in page


# ------------------------------------------------------------------------------------------------------------- day two


def test_the_next_day_goes_on_without_a_network(played: Played) -> None:
    same = played.day_two["the same"]
    assert "2 examples, 2 of them already measured" in same["err"]
    assert "loading llama2" not in same["err"]
    assert same["out"] == played.day_one["more"]["out"]
    assert "3 examples, 2 of them already measured" in played.day_two["more"]["err"]


def test_offline_what_was_never_fetched_is_named(played: Played) -> None:
    assert re.search(r"error: meta-llama/Llama-2-7b-hf: .*HF_HUB_OFFLINE", played.day_two["never fetched"]["err"])


# -------------------------------------------------------------------------------------------------------------- oracles


def _rendered(shared: Path) -> list[str]:
    template = json.loads((shared / "longbench" / "config" / longbench.PROMPTS).read_bytes())["hotpotqa"]
    return [template.format(context=row["context"], input=row["input"]) for row in _rows(shared)]


def _truncated(text: str, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]) -> str:
    ids = encode(text)
    return decode(ids[:300]) + decode(ids[-300:]) if len(ids) > 600 else text


def _compare(records: list[Record], prompts: list[list[int]], answer: list[int], scores: list[int]) -> None:
    hashes = [hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest() for prompt in prompts]
    assert [record.prompt_sha256 for record in records] == hashes
    for record, score in zip(records, scores, strict=True):
        assert record.baseline is not None
        for side in (record.method, record.baseline):
            assert side.token_ids == answer
            assert side.score == score
