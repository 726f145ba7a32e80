"""Official prompts and rows of the hub, downloads that fail half-way, and the cache of the package `datasets`."""

import hashlib
import io
import re
import socket
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.benchmarks import babilong, downloads, longbench_v2, scbench
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.downloads import HubDataset, official_file
from eval.benchmarks.rows import sha256_of
from eval.benchmarks.suite import DataSettings
from lazyllm.errors import UserError
from tests.eval.benchmarks import test_babilong, test_longbench_v2, test_scbench
from tests.runs import run_of


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


def own_files(suite: str, folder: Path) -> tuple[str, tuple[str, str | None, str], list[Any]]:
    """Writes a suite's files with prompts of our own. Returns the prompts' hash, and its rows on the hub."""
    if suite == "longbench_v2":
        rows = [test_longbench_v2.row(0), test_longbench_v2.row(1)]
        test_longbench_v2.write(folder, *rows)
        own = hashlib.sha256(test_longbench_v2.PROMPT.encode()).hexdigest()
        return own, ("THUDM/LongBench-v2", None, "train"), rows
    if suite == "scbench":
        rows = [test_scbench.row("scbench_mf"), test_scbench.row("scbench_mf", 1)]
        test_scbench.write(folder, "scbench_mf", *rows)
        return scbench.prompts_sha256(test_scbench.PROMPTS.encode()), ("microsoft/SCBench", "scbench_mf", "test"), rows
    test_babilong.folder(folder, test_babilong.ROW)
    own = sha256_of(babilong.read_prompts((folder / babilong.PROMPTS).read_bytes()))
    return own, ("RMT-team/babilong", "4k", "qa1"), [test_babilong.ROW]


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("longbench_v2", longbench_v2, "PROMPT"),
        ("scbench_mf", scbench, "PROMPTS"),
        ("babilong_qa1", babilong, "PROMPTS"),
    ],
)
def test_rows_come_from_the_hub_and_prompts_once_from_a_commit(
    name, module, kind, tmp_path, monkeypatch, no_hub, hub_rows
) -> None:
    suite, dataset, file = module.SUITE, DATASETS[name], getattr(module, kind)
    settings, urls = DataSettings(options=suite.options and suite.options()), []
    out = rf"give data\.dir=FOLDER with .*{file}, or run once with a network"
    with pytest.raises(UserError, match="is not cached and cannot be downloaded: " + out):
        run_of(f"dataset={name}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=rf"{file} is not cached yet and HF_HUB_OFFLINE is set\. Either {out}"):
        suite.load(dataset, settings)

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        urls.append(url)
        return io.BytesIO((tmp_path / file).read_bytes())

    own, on_hub, hub_rows_of_it = own_files(suite.name, tmp_path)
    hub_rows[on_hub] = hub_rows_of_it
    monkeypatch.setattr(module, f"{kind}_SHA256", own)
    monkeypatch.setattr(downloads, "require_network", lambda *_: None)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    made = suite.load(dataset, settings)
    assert suite.load(dataset, settings) == made
    assert made.examples == suite.load(dataset, replace(settings, dir=tmp_path)).examples
    assert urls == [getattr(module, f"{kind}_URL")]
    assert re.search("/[0-9a-f]{40}/", urls[0])
    (cached,) = (tmp_path / suite.name).rglob(Path(file).name)
    cached.write_text(cached.read_text().replace("e", "E"))
    with pytest.raises(UserError, match=r"not .*'s own|holds no prompts|not BABILong's prompts"):
        suite.load(dataset, settings)


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
