"""Official prompts and rows of the hub, downloads that fail half-way, and the cache of the package `datasets`."""

import hashlib
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from eval.benchmarks import longbench_v2
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.downloads import HubDataset, official_file
from eval.benchmarks.suite import DataSettings
from lazyllm.errors import UserError
from tests.eval.benchmarks import test_longbench_v2
from tests.hub_server import HubServer
from tests.runs import run_of


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut", "could not be downloaded"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ncut\r\n", "could not be downloaded"),
        (b"no HTTP\r\n\r\n", "does not answer"),
    ],
)
def test_a_download_that_fails_is_refused_and_leaves_no_file(answer, reason, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def serve() -> None:
        for _ in range(1 + ("download" in reason)):  # whether it is there, and the file
            with server.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/file"
        with pytest.raises(UserError, match=rf"{reason}.* data\.dir=FOLDER"):
            official_file("Suite", "file", url, hashlib.sha256(b"cut short").hexdigest(), None, "its file")
    assert not list(tmp_path.rglob("*file*"))


def test_rows_come_from_the_hub_and_prompts_once_from_a_commit(tmp_path, monkeypatch, no_hub, hub_rows) -> None:
    rows = [test_longbench_v2.row(0), test_longbench_v2.row(1)]
    test_longbench_v2.write(tmp_path, *rows)
    suite, dataset, path = longbench_v2.SUITE, DATASETS["longbench_v2"], longbench_v2.PROMPT
    assert re.search("/[0-9a-f]{40}/", longbench_v2.PROMPT_URL)
    settings = DataSettings()
    out = rf"give data\.dir=FOLDER with .*{path}, or run once with a network"
    with pytest.raises(UserError, match=f"is not cached and cannot be downloaded: {out}"):
        run_of("dataset=longbench_v2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        UserError, match=rf"{path} is not cached yet and no network is used \(by plan and doctor, .*\)\. Either {out}"
    ):
        suite.load(dataset, settings)

    monkeypatch.delenv("HF_HUB_OFFLINE")
    served = HubServer({}, {f"/{path}": (tmp_path / path).read_bytes()})
    monkeypatch.setattr(longbench_v2, "PROMPT_URL", f"{served.url}/{path}")
    with pytest.raises(UserError, match=r"not .*'s own") as refused:
        suite.load(dataset, settings)
    own = re.search(r"sha256 (\w{64}), expected", str(refused.value))
    assert own is not None
    monkeypatch.setattr(longbench_v2, "PROMPT_SHA256", own[1])
    hub_rows["THUDM/LongBench-v2", None, "train"] = rows
    made = suite.load(dataset, settings)
    assert made == suite.load(dataset, settings)
    assert made.examples == suite.load(dataset, replace(settings, dir=tmp_path)).examples
    assert served.asked.count(("GET", f"/{path}")) == 2
    served.close()
    (cached,) = (tmp_path / suite.name).rglob(Path(path).name)
    cached.write_text(cached.read_text().replace("Read", "Take"))
    with pytest.raises(UserError, match=r"not .*'s own"):
        suite.load(dataset, settings)
    with pytest.raises(UserError, match="does not answer"):  # the damaged file is gone
        suite.load(dataset, settings)


@pytest.mark.parametrize("repository", ["THUDM/LongBench-v2", "simonjegou/ruler", "RMT-team/babilong", "me/2WikiQAs"])
def test_a_cached_dataset_is_found_where_the_package_datasets_puts_it(repository, tmp_path, monkeypatch) -> None:
    from datasets.naming import camelcase_to_snakecase

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    assert not HubDataset(repository, "").is_cached()
    owner, name = repository.split("/")
    (tmp_path / f"{owner}___{camelcase_to_snakecase(name)}").mkdir()  # as `CachedDatasetModuleFactory` looks for it
    assert HubDataset(repository, "").is_cached()
