"""Downloads that fail half-way, and the cache of the package `datasets`."""

import hashlib
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval.benchmarks.downloads import HubDataset, official_file
from lazyllm.errors import UserError


@pytest.fixture
def answering(request: pytest.FixtureRequest):
    """The address of a server that gives one answer to every request, then hangs up."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for _ in range(2):  # whether it is there, and the file
            connection, _ = server.accept()
            connection.recv(65536)
            connection.sendall(request.param)
            connection.close()

    threading.Thread(target=answer, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}/file"
    server.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("answering", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut", "could not be downloaded"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ncut\r\n", "could not be downloaded"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "could not be downloaded"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "not Suite's own"),  # a proxy's page
        (b"no HTTP\r\n\r\n", "does not answer"),
    ],
    indirect=["answering"],
)
def test_a_download_that_fails_is_refused_and_leaves_no_file(answering, reason, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(UserError, match=rf"{reason}.* data\.dir=FOLDER"):
        official_file("Suite", "file", answering, hashlib.sha256(b"cut short").hexdigest(), None, "its file")
    assert not list(tmp_path.rglob("*file*"))


@pytest.mark.parametrize("repository", ["THUDM/LongBench-v2", "microsoft/SCBench", "RMT-team/babilong", "me/2WikiQAs"])
def test_a_cached_dataset_is_found_where_the_package_datasets_puts_it(repository, tmp_path, monkeypatch) -> None:
    from datasets.builder import DatasetBuilder
    from datasets.naming import camelcase_to_snakecase

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    built: type = DatasetBuilder
    name = camelcase_to_snakecase(repository.split("/")[1])  # as in its `__init__`
    facts = dict(repo_id=repository, dataset_name=name, config_id="c", _legacy_relative_data_dir=None)
    folder = built._relative_data_dir(SimpleNamespace(**facts), with_version=False, with_hash=False)
    assert not HubDataset(repository, "").is_cached()
    Path(tmp_path, folder).mkdir(parents=True)
    assert HubDataset(repository, "").is_cached()
