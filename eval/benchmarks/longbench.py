"""Rows and prompt templates: LongBench's from a folder or the hub, the embedded suite's from its generator.

A folder (`data.dir=FOLDER`) holds `<dataset>.jsonl` and `config/dataset2prompt.json` and `config/dataset2maxlen.json`.
Without one, the rows come from the hub's `THUDM/LongBench` (file `data.zip`), the two config files from LongBench's
repository at a pinned commit; both are fetched once into the same layout under `~/.cache/lazyllm-bench/longbench`
(`$LAZYLLM_BENCH_CACHE/longbench` where that is set).
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
import shutil
import stat
import struct
import tempfile
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from eval.benchmarks.datasets import DATASETS, TASKS, Dataset
from eval.benchmarks.metrics import gold_problem
from lazyllm.errors import UserError
from lazyllm.models.hub import is_offline, is_reachable

OnError = Literal["raise", "skip"]

HUB_REPOSITORY, HUB_FILE = "THUDM/LongBench", "data.zip"
CONFIG_URL = (
    "https://raw.githubusercontent.com/THUDM/LongBench/2e00731f8d0bff23dc4325161044d0ed8af94c1e/LongBench/config/"
)
PROMPTS, MAX_LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"
CONFIG_SHA256 = {
    PROMPTS: "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30",
    MAX_LENGTHS: "72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022",
}

EMBEDDED_ROWS = 240  # 80 of each prompt length; a run takes the first `limit` of them

# What `data.zip` may be at most; the real one has a few dozen members. An archive beyond it is not LongBench's.
MAX_MEMBERS = 1000
MAX_MEMBER_BYTES = 2 * 2**30
MAX_TOTAL_BYTES = 4 * 2**30
MAX_RATIO, RATIO_FROM_BYTES = 100, 2**20  # text packs to a fifth; small members may do better
MAX_CONFIG_BYTES = 2**20

_RECORD = "data.zip.json"  # written beside the unpacked rows: where they came from, and their checksums
_SKIP_HINT = "Mend the row, or go on without such rows with data.on_error=skip"


class TemplateWarning(UserWarning):
    """Templates or answer lengths that are not LongBench's own: scores do not compare with published ones."""


@dataclass(frozen=True)
class Example:
    """One row. Field names are LongBench's, except `id` (its `_id`).

    id: LongBench's own, or a hash of the row where it has none; unique in its dataset.
    answers: the gold answers, at least one.
    all_classes: the class names; empty where the dataset is not a classification.
    length: LongBench's length of the row, in words (English) or characters.
    """

    dataset: str
    id: str
    input: str
    context: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...]
    length: int
    language: str


@dataclass(frozen=True)
class Skipped:
    """A row that was left out: where (file:line) and why."""

    where: str
    reason: str


@dataclass(frozen=True)
class LoadedDataset:
    """A dataset's rows with what its prompts and answers need.

    template: the prompt template, with `{context}` and `{input}` to be filled in.
    max_new_tokens: the most tokens an answer may have.
    data_sha256: of the data file's bytes (of the generated rows' JSON for the embedded suite).
    config_sha256: of template and max_new_tokens.
    source: where the rows come from, for people.
    skipped: rows left out, with `on_error="skip"` only.
    """

    dataset: Dataset
    examples: tuple[Example, ...]
    template: str
    max_new_tokens: int
    data_sha256: str
    config_sha256: str
    source: str
    skipped: tuple[Skipped, ...]


def resolve_datasets(names: str | Iterable[str]) -> tuple[Dataset, ...]:
    """The datasets that one name or several stand for, each once, in the order of the names.

    names: "all" (LongBench's 16), "embedded" (all of that suite), a task's name (LongBench's datasets of it), a
        dataset's name; or a list of those.
    Raises UserError: an unknown name (with the closest known ones), or no name at all.
    """
    wanted = [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise UserError("no dataset named; give a dataset, a task, 'all', 'embedded', or a list of those")
    found: dict[str, Dataset] = {}
    for name in wanted:
        found.update((dataset.name, dataset) for dataset in _resolve(name))
    return tuple(found.values())


def load_rows(dataset: Dataset, data_dir: str | Path | None = None, on_error: OnError = "raise") -> LoadedDataset:
    """A dataset's rows, template and answer length.

    data_dir: the folder that holds LongBench's files; None for the hub. The embedded suite needs neither.
    on_error: "raise" at the first row that cannot be used, or "skip" such rows and list them in `skipped`.
    Raises UserError: an unusable row (unless skipped), no usable row, a missing or unusable file, or neither cache nor
        network. Warns (TemplateWarning) where `data_dir` holds templates other than LongBench's own.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    if dataset.suite == "embedded":
        return _load_embedded(dataset, on_error)
    if data_dir is None:
        folder = _fetched_folder(dataset, cache_folder() / "longbench")
    else:
        folder = Path(data_dir).expanduser()
        _check_folder(folder, dataset)
    template, max_new_tokens = _read_config(folder / "config", dataset)
    file = folder / f"{dataset.name}.jsonl"
    data = file.read_bytes()
    data_sha256 = hashlib.sha256(data).hexdigest()
    if data_dir is None:
        _check_recorded(file, data_sha256)
    examples, skipped = _examples(dataset, _lines(data, file), on_error, str(file))
    return LoadedDataset(
        dataset,
        examples,
        template,
        max_new_tokens,
        data_sha256,
        _config_sha256(template, max_new_tokens),
        str(file),
        skipped,
    )


def cache_folder() -> Path:
    """The folder for what is fetched: `$LAZYLLM_BENCH_CACHE`, or `~/.cache/lazyllm-bench`."""
    return Path(os.environ.get("LAZYLLM_BENCH_CACHE") or "~/.cache/lazyllm-bench").expanduser()


def unpack_rows(archive: Path, folder: Path) -> dict[str, str]:
    """Unpacks LongBench's `data/<dataset>.jsonl` members into `folder`, each put in place when complete.

    Returns {file name: sha256}. Members for other files are left in the archive.
    Raises UserError: no zip file, or one that LongBench's cannot be: a member with an absolute path or `..`, a link, an
        encrypted or repeated member, implausibly many, large or tightly packed members, a checksum that does not hold.
    """
    wanted = {f"data/{dataset.name}.jsonl" for dataset in DATASETS.values() if dataset.suite == "longbench"}
    checksums = {}
    try:
        with zipfile.ZipFile(archive) as opened:
            members = opened.infolist()
            _check_members(archive, members)
            for member in members:
                if member.filename in wanted:
                    name = PurePosixPath(member.filename).name
                    with opened.open(member) as stream:
                        checksums[name] = _put(stream, folder / name)
    except UserError:
        raise
    # what damaged headers raise is not all BadZipFile
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError) as error:
        raise UserError(f"{archive}: not a usable zip file ({error}); delete it to have it fetched anew") from error
    except OSError as error:
        raise UserError(
            f"{archive}: could not be unpacked into {folder} ({error}): a full disk or a damaged file: make room, "
            "or delete it to have it fetched anew"
        ) from error
    if not checksums:
        raise UserError(f"{archive}: holds no data/<dataset>.jsonl, so it is not LongBench's {HUB_FILE}")
    return checksums


def _resolve(name: Any) -> list[Dataset]:
    if not isinstance(name, str):
        raise UserError(f"a dataset is named by a string, got {name!r}")
    if name == "all":
        return [dataset for dataset in DATASETS.values() if dataset.suite == "longbench"]
    if name == "embedded":
        return [dataset for dataset in DATASETS.values() if dataset.suite == "embedded"]
    if name in TASKS:
        return [dataset for dataset in DATASETS.values() if (dataset.suite, dataset.task) == ("longbench", name)]
    if name in DATASETS:
        return [DATASETS[name]]
    known = ["all", "embedded", *TASKS, *DATASETS]
    close = difflib.get_close_matches(name, known)
    meant = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"
    raise UserError(f"unknown dataset {name!r}: {meant}")


# ---------------------------------------------------------------------------------------------------------------- rows


def _lines(data: bytes, file: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, row or the UserError why it is none) of every line that is not blank.

    Lines end at \\n only, and nothing is normalised: rows hold \\r and other characters at which text mode would split.
    """
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            where = f"{file}:{number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield where, UserError(f"not valid JSON in UTF-8 ({error})")


def _examples(
    dataset: Dataset, rows: Iterable[tuple[str, Any]], on_error: OnError, source: str
) -> tuple[tuple[Example, ...], tuple[Skipped, ...]]:
    """The usable rows in their order and, with "skip", the others with the reason."""
    examples: list[Example] = []
    skipped: list[Skipped] = []
    places: dict[str, str] = {}
    for where, row in rows:
        try:
            example = _example(dataset, row)
            if example.id in places:
                raise UserError(f"the same _id as in {places[example.id]} ({example.id!r}); expected each row once")
        except (UserError, RecursionError) as error:  # a row may be nested so deeply that it can be read and not shown
            if on_error == "raise":
                raise UserError(f"{where}: {error}. {_SKIP_HINT}") from error
            skipped.append(Skipped(where, str(error)))
        else:
            places[example.id] = where
            examples.append(example)
    if not examples:
        first = (
            f": {len(skipped)} skipped, the first ({skipped[0].where}) because {skipped[0].reason}" if skipped else ""
        )
        raise UserError(f"{source}: no usable row{first}; expected one JSON object a line in LongBench's format")
    return tuple(examples), tuple(skipped)


def _example(dataset: Dataset, row: Any) -> Example:
    """A row, checked. Raises UserError with the reason (and not the place) where it cannot be used."""
    if isinstance(row, UserError):
        raise row
    if not isinstance(row, dict):
        raise UserError(f"expected a JSON object, got {type(row).__name__}")
    for field, accepts, expected in _FIELDS:
        if field not in row:
            raise UserError(f"field {field!r} is missing; expected {', '.join(name for name, _, _ in _FIELDS)}")
        if not accepts(row[field]):
            raise UserError(f"field {field!r} must be {expected}, got {_short(row[field])}")
    if row["dataset"] != dataset.name:
        raise UserError(
            f"field 'dataset' must be {dataset.name!r} as the file's name says, got {_short(row['dataset'])}"
        )
    problem = gold_problem(dataset, row["answers"], row["all_classes"])
    if problem is not None:
        raise UserError(problem)
    identity = row.get("_id")
    if identity is None:
        identity = hashlib.sha256(_canonical(row).encode()).hexdigest()[:48]
    elif not _is_text(identity) or not identity:
        raise UserError(f"field '_id' must be a string that is not empty, got {_short(identity)}")
    return Example(
        dataset=dataset.name,
        id=identity,
        input=row["input"],
        context=row["context"],
        answers=tuple(row["answers"]),
        all_classes=tuple(row["all_classes"] or ()),
        length=row["length"],
        language=row["language"],
    )


def _is_text(value: Any) -> bool:
    # JSON can spell half of a surrogate pair, which no tokenizer and no file takes.
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_text(item) for item in value)


_FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("input", _is_text, "a string"),
    ("context", lambda value: _is_text(value) and bool(value.strip()), "a string that is not empty"),
    ("answers", _is_texts, "a list of strings"),
    ("length", lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0, "a whole number"),
    ("dataset", _is_text, "a string"),
    ("language", _is_text, "a string"),
    ("all_classes", lambda value: value is None or _is_texts(value), "a list of strings or null"),
)


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}... ({type(value).__name__})"


def _canonical(row: Any) -> str:
    return json.dumps(row, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


# ------------------------------------------------------------------------------------------ templates, embedded, folder


def _load_embedded(dataset: Dataset, on_error: OnError) -> LoadedDataset:
    from eval.benchmarks import embedded  # generating rows is for those who ask for them

    rows = embedded.rows(dataset.name, count=EMBEDDED_ROWS)
    data_sha256 = hashlib.sha256("\n".join(map(_canonical, rows)).encode()).hexdigest()
    source = f"embedded suite, {dataset.name}"
    places = ((f"{source}, row {number}", row) for number, row in enumerate(rows, start=1))
    examples, skipped = _examples(dataset, places, on_error, source)
    template, max_new_tokens = embedded.TEMPLATES[dataset.name], embedded.MAX_NEW_TOKENS[dataset.name]
    config_sha256 = _config_sha256(template, max_new_tokens)
    return LoadedDataset(dataset, examples, template, max_new_tokens, data_sha256, config_sha256, source, skipped)


def _check_folder(folder: Path, dataset: Dataset) -> None:
    """Raises UserError where a folder lacks a file; warns where its config files are not LongBench's own."""
    if not folder.is_dir():
        raise UserError(f"data.dir={folder}: no such folder; {_folder_content(dataset)}")
    for name in (f"{dataset.name}.jsonl", f"config/{PROMPTS}", f"config/{MAX_LENGTHS}"):
        if not (folder / name).is_file():
            raise UserError(f"data.dir={folder}: {name} is missing; {_folder_content(dataset)}")
    other = [name for name in CONFIG_SHA256 if _file_sha256(folder / "config" / name) != CONFIG_SHA256[name]]
    if other:
        warnings.warn(
            f"{folder / 'config'}: {' and '.join(other)} differ from LongBench's own, so scores do not compare with "
            "published ones",
            TemplateWarning,
            stacklevel=3,
        )


def _folder_content(dataset: Dataset) -> str:
    return (
        f"the folder must hold {dataset.name}.jsonl, config/{PROMPTS} and config/{MAX_LENGTHS}, as LongBench has them"
    )


def _read_config(folder: Path, dataset: Dataset) -> tuple[str, int]:
    """(template, max_new_tokens) of a dataset from LongBench's two config files."""
    template = _config_value(folder / PROMPTS, dataset)
    if not isinstance(template, str) or not template:
        raise UserError(
            f"{folder / PROMPTS}: the template of {dataset.name!r} must be a string, got {_short(template)}"
        )
    max_new_tokens = _config_value(folder / MAX_LENGTHS, dataset)
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise UserError(
            f"{folder / MAX_LENGTHS}: the answer length of {dataset.name!r} must be a whole number of at least 1, "
            f"got {_short(max_new_tokens)}"
        )
    return template, max_new_tokens


def _config_value(file: Path, dataset: Dataset) -> Any:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON in UTF-8 ({error})") from error
    if not isinstance(content, dict) or dataset.name not in content:
        raise UserError(f"{file}: expected a JSON object with an entry {dataset.name!r}")
    return content[dataset.name]


def _config_sha256(template: str, max_new_tokens: int) -> str:
    return hashlib.sha256(_canonical([template, max_new_tokens]).encode()).hexdigest()


def _file_sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------- fetching, caching


def _fetched_folder(dataset: Dataset, folder: Path) -> Path:
    """`folder`, with what the dataset needs in it; fetches what is not there yet.

    Raises UserError: not there and no network, or what is there or comes is not LongBench's.
    """
    if not (folder / f"{dataset.name}.jsonl").is_file():
        _fetch_rows(dataset, folder)
    for name, sha256 in CONFIG_SHA256.items():
        file = folder / "config" / name
        if not file.is_file():
            _fetch_config(name, sha256, dataset, folder)
        elif _file_sha256(file) != sha256:
            raise UserError(f"{file}: not LongBench's own (its sha256 differs); delete it to have it fetched anew")
    return folder


def _fetch_rows(dataset: Dataset, folder: Path) -> None:
    """Unpacks the hub's archive into `folder` and records where it came from, with checksums."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    cached = try_to_load_from_cache(HUB_REPOSITORY, HUB_FILE, repo_type="dataset")
    if isinstance(cached, str):
        archive = Path(cached)
    else:
        _require_network(constants.ENDPOINT, dataset, folder)
        try:
            archive = Path(hf_hub_download(HUB_REPOSITORY, HUB_FILE, repo_type="dataset"))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise UserError(
                f"{HUB_REPOSITORY}/{HUB_FILE} did not come ({error}). {_ways_out(dataset, folder)}"
            ) from error
    folder.mkdir(parents=True, exist_ok=True)
    checksums = unpack_rows(archive, folder)
    record = {
        "repository": HUB_REPOSITORY,
        "file": HUB_FILE,
        "revision": archive.parent.name,  # the hub's cache keeps a file under snapshots/<commit>/
        "sha256": _file_sha256(archive),
        "unpacked": checksums,
    }
    _put_bytes(json.dumps(record, indent=2).encode(), folder / _RECORD)
    if f"{dataset.name}.jsonl" not in checksums:
        raise UserError(f"{archive}: holds no data/{dataset.name}.jsonl. {_ways_out(dataset, folder)}")


def _fetch_config(name: str, sha256: str, dataset: Dataset, folder: Path) -> None:
    """Fetches one config file from LongBench's pinned commit; refuses it where its checksum is not the pinned one."""
    url = CONFIG_URL + name
    _require_network(url, dataset, folder)
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read(MAX_CONFIG_BYTES)
    except (urllib.error.URLError, OSError) as error:
        raise UserError(f"{url} did not come ({error}). {_ways_out(dataset, folder)}") from error
    came = hashlib.sha256(content).hexdigest()
    if came != sha256:
        raise UserError(
            f"{url}: what came is not LongBench's file (sha256 {came}, expected {sha256}), so it is refused. "
            f"{_ways_out(dataset, folder)}"
        )
    (folder / "config").mkdir(parents=True, exist_ok=True)
    _put_bytes(content, folder / "config" / name)


def _require_network(url: str, dataset: Dataset, folder: Path) -> None:
    if is_offline():
        raise UserError(f"{dataset.name} is not cached yet and HF_HUB_OFFLINE is set. {_ways_out(dataset, folder)}")
    if not is_reachable(url):
        raise UserError(f"{dataset.name} is not cached yet and {url} does not answer. {_ways_out(dataset, folder)}")


def _ways_out(dataset: Dataset, folder: Path) -> str:
    return (
        f"Either give data.dir=FOLDER, where {_folder_content(dataset)}; or run once with a network, which fills "
        f"{folder} (a machine without one can be given a copy of that folder)"
    )


def _check_recorded(file: Path, data_sha256: str) -> None:
    """Raises UserError where an unpacked file is no longer what was unpacked. Files put there by hand have none."""
    record = file.parent / _RECORD
    if not record.is_file():
        return
    expected = json.loads(record.read_bytes())["unpacked"].get(file.name)
    if expected not in (None, data_sha256):
        raise UserError(
            f"{file}: changed since it was unpacked (sha256 in {record}); delete it to have it unpacked anew"
        )


def _check_members(archive: Path, members: list[zipfile.ZipInfo]) -> None:
    def refuse(why: str) -> UserError:
        return UserError(
            f"{archive}: refused, {why}; LongBench's {HUB_FILE} is not like that, delete it to fetch it anew"
        )

    if len(members) > MAX_MEMBERS:
        raise refuse(f"it has {len(members)} members, more than {MAX_MEMBERS}")
    if sum(member.file_size for member in members) > MAX_TOTAL_BYTES:
        raise refuse(f"unpacked it would be larger than {MAX_TOTAL_BYTES} bytes")
    names = set()
    for member in members:
        name = member.filename
        if name.startswith(("/", "\\")) or ":" in name or ".." in PurePosixPath(name.replace("\\", "/")).parts:
            raise refuse(f"its member {name!r} points out of the folder")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise refuse(f"its member {name!r} is a link")
        if member.flag_bits & 1:
            raise refuse(f"its member {name!r} is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise refuse(f"its member {name!r} is packed by method {member.compress_type}, not stored or deflated")
        if member.file_size > MAX_MEMBER_BYTES:
            raise refuse(f"its member {name!r} would be larger than {MAX_MEMBER_BYTES} bytes")
        if member.file_size > max(RATIO_FROM_BYTES, MAX_RATIO * member.compress_size):
            raise refuse(f"its member {name!r} would be more than {MAX_RATIO} times as large as it is packed")
        if name in names:
            raise refuse(f"its member {name!r} is there twice")
        names.add(name)


def _put_bytes(content: bytes, target: Path) -> None:
    _put(io.BytesIO(content), target)


def _put(stream: IO[bytes], target: Path) -> str:
    """Writes a stream to `target`, which is complete or not there, also for other processes; returns its sha256."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as written:
            shutil.copyfileobj(stream, written)
        sha256 = _file_sha256(Path(name))
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return sha256
