from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.record import Failure, Measurement, Record, compact_counts
from eval.store import StoreError, fingerprint, open_store, read_run

IDENTITY = {"model": "tiny", "method": {"name": "lazy", "schedule": {"2": 0.7}}, "seed": 0}


def measurement(text: str = "an answer", score: float = 0.5, **changes) -> Measurement:
    values = dict(
        text=text, token_ids=[3, 4], score=score, rouge_l=None, ttft_s=0.2, scoring_s=0.0, total_s=0.3,
        decode_step_s=[0.1],
        pct_prompt_tokens_computed=75.0, group_starts=[1, 3], computed=[[8, 4], [8, 5]], kv_bytes=640, aux_bytes=32,
        peak_memory_bytes=None,
    )  # fmt: skip
    return Measurement(**(values | changes))


def record(number: int, dataset: str = "hotpotqa", **changes) -> Record:
    method, baseline = measurement(**changes), measurement("base", ttft_s=0.4)
    return Record(dataset, f"row-{number}", "abc", 100, 120, method, baseline, "...\nQuestion: why?", ["because", "so"])


@given(st.text(), st.floats(0, 1), st.lists(st.integers(0, 50_000)))
def test_a_record_comes_back_as_it_was(text: str, score: float, token_ids: list[int]) -> None:
    one = record(1, text=text, score=score, token_ids=token_ids)
    line = one.to_json()
    assert "\n" not in line
    assert "\r" not in line
    assert Record.from_json(line) == one


def test_a_record_of_before_prompt_ends_were_kept_is_read() -> None:
    values = json.loads(record(1).to_json())
    del values["prompt_end"], values["answers"]
    assert Record.from_json(json.dumps(values)) == replace(record(1), prompt_end="", answers=[])


def test_compact_counts_lose_nothing() -> None:
    rng = random.Random(0)
    for _ in range(50):
        steps, groups = rng.randint(1, 5), rng.randint(1, 4)
        widths = [rng.randint(1, 4) for _ in range(groups)]
        counts = np.array([[rng.randint(0, 2) for _ in range(groups)] for _ in range(steps)])
        full = np.repeat(counts, widths, axis=1)
        starts, compact = compact_counts(full)
        ends = [*starts[1:], full.shape[1] + 1]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        assert np.array_equal(np.repeat(np.array(compact), lengths, axis=1), full)


def test_append_and_read(tmp_path: Path) -> None:
    with open_store(tmp_path / "run", IDENTITY, {"config": {"a": 1}}) as store:
        for number in range(3):
            store.append(record(number))
    about, records = read_run(tmp_path / "run")
    assert records == [record(number) for number in range(3)]
    assert about["fingerprint"] == fingerprint(IDENTITY)
    assert about["identity"] == IDENTITY
    assert about["config"] == {"a": 1}


@pytest.mark.parametrize("cut", [1, 2, 57, -3])
def test_a_half_written_last_line_is_cut_off_and_redone(tmp_path: Path, cut: int) -> None:
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
        store.append(record(1))
    file = tmp_path / "records.jsonl"
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    file.write_bytes(whole[: first + cut] if cut > 0 else whole[:cut])
    with open_store(tmp_path, IDENTITY, {}) as store:
        assert list(store.records) == [("hotpotqa", "row-0")]
        assert file.read_bytes() == whole[:first]
        store.append(record(1))
    assert file.read_bytes() == whole


def test_a_garbled_line_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
    file = tmp_path / "records.jsonl"
    before = file.read_bytes() + b'{"dataset": "hotpotqa"}\n' + b"\xff\xfe\n" + b'{"half'
    file.write_bytes(before)
    with pytest.raises(StoreError, match=r"records\.jsonl:2: not a record"), open_store(tmp_path, IDENTITY, {}):
        pass
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"method": {"name": "lazy", "schedule": {"2": 0.5}}}, {"device": "another"}]
)
def test_another_identity_is_refused_and_named(tmp_path: Path, change: dict) -> None:
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
    with pytest.raises(StoreError, match=f"differs \\({next(iter(change))}: .*out=FOLDER"):
        open_store(tmp_path, IDENTITY | change, {}).__enter__()
    assert fingerprint(IDENTITY | change) != fingerprint(IDENTITY)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        open_store(tmp_path, IDENTITY, {}),
        pytest.raises(StoreError, match="another process"),
        open_store(tmp_path, IDENTITY, {}),
    ):
        pass
    with open_store(tmp_path, IDENTITY, {}):
        pass  # released


def test_shards_write_files_of_their_own_and_are_read_as_one_run(tmp_path: Path) -> None:
    with open_store(tmp_path, IDENTITY, {}, "-1-of-2") as one, open_store(tmp_path, IDENTITY, {}, "-2-of-2") as two:
        one.append(record(0))
        one.fail(Failure("hotpotqa", "row-2", "out of memory", "..."))
        two.append(record(1))
        assert set(one.records) == {("hotpotqa", "row-0")}
        one.reload()
        two.reload()
        assert set(one.records) == set(two.records) == {("hotpotqa", "row-0"), ("hotpotqa", "row-1")}
        assert [failure.id for failure in two.failures] == ["row-2"]
    assert (tmp_path / "records-1-of-2.jsonl").read_text() == record(0).to_json() + "\n"
    assert (tmp_path / "records-2-of-2.jsonl").read_text() == record(1).to_json() + "\n"
    assert read_run(tmp_path)[1] == [record(0), record(1)]
    with open_store(tmp_path, IDENTITY, {}) as whole:  # goes on with what shards have left
        assert len(whole.records) == 2
        whole.append(record(2))
    assert (tmp_path / "records.jsonl").read_text() == record(2).to_json() + "\n"
    assert sorted(one.id for one in read_run(tmp_path)[1]) == ["row-0", "row-1", "row-2"]
    with open_store(tmp_path, IDENTITY, {}, "-1-of-2") as one:
        assert len(one.records) == 3
        assert one.failures == []


def test_a_shards_half_line_is_left_to_the_shard(tmp_path: Path) -> None:
    with open_store(tmp_path, IDENTITY, {}, "-1-of-2") as store:
        store.append(record(0))
    file = tmp_path / "records-1-of-2.jsonl"
    half = file.read_bytes() + b'{"dataset": "hot'
    file.write_bytes(half)
    with open_store(tmp_path, IDENTITY, {}, "-2-of-2") as other:
        assert list(other.records.values()) == [record(0)]
    assert file.read_bytes() == half
    with open_store(tmp_path, IDENTITY, {}, "-1-of-2"):
        assert file.read_bytes() == record(0).to_json().encode() + b"\n"


@pytest.mark.parametrize(("first", "second"), [("-1-of-2", "-1-of-2"), ("-1-of-2", ""), ("", "-1-of-2")])
def test_one_shard_in_two_processes_or_a_shard_beside_the_whole_run_is_refused(
    tmp_path: Path, first: str, second: str
) -> None:
    with (
        open_store(tmp_path, IDENTITY, {}, first),
        pytest.raises(StoreError, match="another process"),
        open_store(tmp_path, IDENTITY, {}, second),
    ):
        pass


def test_shards_of_another_run_are_refused(tmp_path: Path) -> None:
    with (
        open_store(tmp_path, IDENTITY, {}, "-1-of-2"),
        pytest.raises(StoreError, match=r"differs \(seed"),
        open_store(tmp_path, IDENTITY | {"seed": 1}, {}, "-2-of-2"),
    ):
        pass
    (tmp_path / "run.json").unlink()
    (tmp_path / "records-1-of-2.jsonl").write_text(record(0).to_json() + "\n")
    with pytest.raises(StoreError, match=r"no run\.json"):
        open_store(tmp_path, IDENTITY, {}, "-2-of-2").__enter__()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(record(0).to_json() + "\n")
    with pytest.raises(StoreError, match=r"no run\.json"):
        open_store(tmp_path, IDENTITY, {}).__enter__()
    (tmp_path / "run.json").write_text(json.dumps({"schema": 99, "identity": IDENTITY}))
    with pytest.raises(StoreError, match="schema 99"):
        open_store(tmp_path, IDENTITY, {}).__enter__()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(StoreError, match="cannot be read"):
        open_store(tmp_path, IDENTITY, {}).__enter__()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        open_store(file / "run", IDENTITY, {}).__enter__()


def test_readers_change_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
    file = tmp_path / "records.jsonl"
    half = file.read_bytes() + b'{"dataset": "hot'  # as a reader finds it while the run goes on
    file.write_bytes(half)
    assert read_run(tmp_path)[1] == [record(0)]
    assert file.read_bytes() == half


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch, caplog) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("eval.store.fcntl.flock", no_locks)
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
    assert "cannot be locked" in caplog.text


def test_a_full_disk_says_what_is_safe(tmp_path: Path, monkeypatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
        monkeypatch.setattr("eval.store.os.fsync", full)
        with pytest.raises(StoreError, match="Those before it are safe"):
            store.append(record(1))
        with pytest.raises(StoreError, match="could not be written"):
            store.write("summary.md", "text")
    assert not list(tmp_path.glob(".*.partial"))


def test_a_failure_counts_until_the_example_has_a_record(tmp_path: Path) -> None:
    failed = [
        Failure("hotpotqa", f"row-{number}", "OutOfMemoryError: 2 GB\n more", "Traceback ...") for number in (1, 2)
    ]
    with open_store(tmp_path, IDENTITY, {}) as store:
        for one in failed:
            store.fail(one)
        store.append(record(2))
        assert store.failures == failed[:1]
    with open_store(tmp_path, IDENTITY, {}) as store:  # read back
        assert store.failures == failed[:1]
        assert set(store.records) == {("hotpotqa", "row-2")}
