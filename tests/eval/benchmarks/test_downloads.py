"""Downloads that fail half-way, damaged caches, no network, and datasets of the hub."""

import hashlib
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks import downloads
from eval.benchmarks.downloads import find_split, hub_file, official_file
from lazyllm.errors import UserError
from tests.hub_server import HubServer

CONTENT = b"cut short"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
WAYS_OUT = r"Either give data\.dir=FOLDER with its file, or run once with a network, which fills "


def fetch(url: str) -> bytes:
    return official_file("A Suite", "folder/file", url, SHA256, None, "its file")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ncut\r\n",
        b"no HTTP\r\n\r\n",
    ],
)
def test_a_download_that_fails_is_refused_and_leaves_no_file(
    answer: bytes, tmp_path: Path, hub: HubServer
) -> None:
    def serve() -> None:
        with server.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/file"
        with pytest.raises(UserError, match=rf"{url} could not be downloaded \(.*\)\. {WAYS_OUT}"):
            fetch(url)
    assert not list(tmp_path.rglob("*file*"))


def test_a_file_is_fetched_once_and_again_if_it_is_damaged(tmp_path: Path, hub: HubServer) -> None:
    hub.others["/file"] = CONTENT
    assert [fetch(f"{hub.url}/file") for _ in range(2)] == [CONTENT, CONTENT]
    cached = tmp_path / "cache" / "a_suite" / "folder" / "file"
    cached.write_bytes(b"else")
    assert fetch(f"{hub.url}/file") == CONTENT == cached.read_bytes()
    assert len(hub.requests) == 2
    hub.others["/file"] = b"else"
    cached.unlink()
    with pytest.raises(UserError, match=rf"not A Suite's own \(sha256 \w+, expected {SHA256}\)"):
        fetch(f"{hub.url}/file")
    assert not cached.exists()


def test_without_a_network_a_line_names_two_ways_out(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.close()
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the hub's tries
    attempts = (
        partial(fetch, f"{hub.url}/file"),
        partial(hub_file, "me/rows", "rows.json", None, "its file"),
    )
    for attempt in attempts:
        with pytest.raises(UserError, match=rf"could not be downloaded \(.*\)\. {WAYS_OUT}"):
            attempt()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = r"is not cached yet and no network is used \(by plan and doctor, .*\)\. "
    for attempt in attempts:
        with pytest.raises(UserError, match=offline + WAYS_OUT):
            attempt()


def test_a_split_is_looked_for_in_the_cache_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    tried = list[bool]()

    def load_dataset(*_: Any, split: str) -> str:
        tried.append(datasets.config.HF_HUB_OFFLINE)
        if tried[-1] or split == "nowhere":
            raise ConnectionError("Couldn't reach it")
        return "rows"

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    downloads.find_split.cache_clear()
    assert find_split("me/rows", None, "test") == ("rows", None)
    assert tried == [True, False]
    table, reason = find_split("me/rows", None, "nowhere")
    assert table is None
    assert reason is not None
    assert reason.startswith("me/rows is not cached and cannot be downloaded (ConnectionError")
    assert find_split("me/rows", None, "nowhere") == (None, reason)
    assert tried == [True, False] * 2  # a failure is remembered: it may take half a minute
    assert datasets.config.HF_HUB_OFFLINE is False
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_split("me/rows", "other", "test")[0] is None
    assert tried == [True, False] * 2 + [True]
    downloads.find_split.cache_clear()


def test_a_dataset_that_datasets_has_cached_is_read_without_the_hub(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the package `datasets` itself, from rows of a file that it has put into its cache."""
    import datasets

    hub.close()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    (folder,) = (tmp_path / "datasets" / "json").iterdir()
    folder.rename(folder.with_name("default"))
    (tmp_path / "datasets" / "json").rename(tmp_path / "datasets" / "me___own_rows")
    for file in (tmp_path / "datasets").rglob("json-train.arrow"):
        file.rename(file.with_name("own_rows-train.arrow"))
    downloads.find_split.cache_clear()
    table, reason = find_split("me/OwnRows", None, "train")
    assert reason is None
    assert [row["n"] for row in table] == [1, 2]
    downloads.find_split.cache_clear()
