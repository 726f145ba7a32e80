"""LongBench-E: the archive's `_e` files, prompts of LongBench's datasets, scores by length."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from eval import cli
from eval.analysis.tables import TABLES
from eval.benchmarks import longbench
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.metrics import dataset_score
from eval.store.results import Results
from eval.store.runs import StoredRun
from lazyllm.errors import UserError
from tests.eval.benchmarks.test_longbench import ROW, as_line, folder, place_of, server  # noqa: F401
from tests.eval.store.made import record
from tests.hub_server import HubServer

NAMES = [dataset.name for dataset in longbench.SUITE_E.datasets]
# LongBench's README: LongBench-E has these 13
OFFICIAL = """
    qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum passage_count
    passage_retrieval_en lcc repobench-p
""".split()  # noqa: SIM905


def write(folder, *rows):  # noqa: F811
    (folder / "qasper_e.jsonl").write_text("".join(f"{as_line(row)}\n" for row in rows))


def test_the_datasets_are_longbenchs_in_all_but_rows():
    assert [f"{name}_e" for name in OFFICIAL] == NAMES
    for name in OFFICIAL:
        same = replace(DATASETS[f"{name}_e"], name=name, suite="longbench", prompt_of="")
        assert same == DATASETS[name]


@pytest.mark.filterwarnings("ignore::eval.benchmarks.longbench.TemplateWarning")
def test_rows_are_in_the_group_of_their_length(folder):  # noqa: F811
    lengths = [0, 3999, 4000, 7999, 8000, 70_000]
    write(folder, *(ROW | {"length": length, "_id": f"{length}"} for length in lengths))
    loaded = load_rows(DATASETS["qasper_e"], folder)
    assert [example.groups for example in loaded.examples] == [
        ("length=0-4k",), ("length=0-4k",), ("length=4-8k",), ("length=4-8k",), ("length=8k+",), ("length=8k+",)
    ]  # fmt: skip
    assert (loaded.template, loaded.max_new_tokens) == ("Read: {context}\nAsk: {input} ", 9)
    write(folder, ROW | {"dataset": "qasper_e"})
    assert len(load_rows(DATASETS["qasper_e"], folder).examples) == 1


@pytest.mark.filterwarnings("ignore::eval.benchmarks.longbench.TemplateWarning")
def test_a_malformed_row_is_named_by_file_line_and_field(folder):  # noqa: F811
    write(folder, ROW, ROW | {"length": "long"})
    with pytest.raises(UserError, match=r"qasper_e\.jsonl:2: field 'length' must be a whole number"):
        load_rows(DATASETS["qasper_e"], folder)
    with pytest.raises(UserError, match=r"hotpotqa_e\.jsonl is missing; the folder must hold hotpotqa_e\.jsonl"):
        load_rows(DATASETS["hotpotqa_e"], folder)


def test_rows_come_from_the_same_archive(server: HubServer, monkeypatch):  # noqa: F811
    import hashlib
    import io
    import zipfile

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as opened:
        opened.writestr("data/qasper_e.jsonl", as_line(ROW))
    files, path = place_of(server, "data.zip")
    files[path] = packed.getvalue()
    monkeypatch.setattr(longbench, "HUB_SHA256", hashlib.sha256(packed.getvalue()).hexdigest())
    assert load_rows(DATASETS["qasper_e"]).source.endswith("data.zip:data/qasper_e.jsonl")


def test_offline_and_not_cached_names_both_ways_out(server: HubServer):  # noqa: F811
    server.close()
    with pytest.raises(UserError, match=r"qasper_e is not cached .*data\.dir=FOLDER.* Or run once with a network"):
        load_rows(DATASETS["qasper_e"])


@pytest.mark.filterwarnings("ignore::eval.benchmarks.longbench.TemplateWarning")
def test_the_command_writes_rows_that_can_be_read_again(folder, tmp_path):  # noqa: F811
    write(folder, ROW, ROW | {"_id": "two", "length": 5000})
    out = tmp_path / "out"
    assert cli.main(["rows", "dataset=qasper_e", f"data.dir={folder}", f"out={out}"]) == 0
    assert [json.loads(line)["length"] for line in (out / "qasper_e.jsonl").read_text().splitlines()] == [3, 5000]
    (out / "config").symlink_to(folder / "config")
    assert load_rows(DATASETS["qasper_e"], out).examples == load_rows(DATASETS["qasper_e"], folder).examples


def test_scores_by_length_are_the_official_ones(tmp_path):
    """Against `scorer_e` of `eval.py`: by dataset and length, the mean times 100, rounded to 2 digits."""
    scores = {"0-4k": [0.5, 0.25, 1 / 3], "4-8k": [1.0], "8k+": [0.0, 0.125]}
    records = [
        replace(record(number, "qasper_e", score=score), id=f"{group}-{number}", groups=[f"length={group}"])
        for group, of_group in scores.items()
        for number, score in enumerate(of_group)
    ]
    about = {
        "fingerprint": "f",
        "identity": {"method": {"name": "lazy"}, "seed": 0, "paired": True},
        "config": {"model": {"name": "tiny", "paper": None}},
    }
    frame = TABLES["groups"](Results([StoredRun(tmp_path, about, records)])).frame
    rows = frame[(frame["method"] == "lazy") & (frame["level"] == "dataset")]
    expected = {f"length={group}": round(100 * sum(of_group) / len(of_group), 2) for group, of_group in scores.items()}
    everything = [score for of_group in scores.values() for score in of_group]
    assert dict(zip(rows["group"], rows["score"], strict=True)) == expected | {"all": dataset_score(everything)}
    assert list(rows["group"]) == ["all", "length=0-4k", "length=4-8k", "length=8k+"]
    assert list(rows["examples"]) == [6, 3, 1, 2]
