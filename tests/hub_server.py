"""A stand-in for the Hugging Face hub on the loopback, which answers `huggingface_hub`'s client
like the hub.

Model info, file trees and files. Gated repositories show their list of files to all, but serve
files only to users with access. Left out: redirects to the hub's caches and storage, which the
client follows by itself, and Xet.
"""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Answer = tuple[bytes, dict[str, str]]  # a body, and headers


@dataclass
class RefusedError(Exception):
    """The hub's error: its status, and what its headers say."""

    status: int
    code: str = ""
    message: str = ""
    commit: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {
            "X-Error-Code": self.code,
            "X-Error-Message": self.message,
            "X-Repo-Commit": self.commit,
        }


@dataclass(frozen=True)
class Repository:
    """files: content by path. gated: the tokens with access; None if everybody has it."""

    files: Mapping[str, bytes]
    kind: str = "models"
    gated: frozenset[str] | None = None
    commit: str = "0123456789abcdef0123456789abcdef01234567"

    @classmethod
    def of(cls, folder: Path) -> "Repository":
        """The files of a folder, for everybody."""
        return cls({file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()})


@dataclass
class HubServer:
    """repositories: by hub id. others: content by path, for other sites (LongBench's templates on
    GitHub).

    requests: (method, path) of every request.
    """

    repositories: dict[str, Repository]
    others: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, token: str) -> Answer:
        """The answer to a user with this token; "" for nobody. Raises RefusedError."""
        if path == "/api/whoami-v2":
            if not token:
                raise RefusedError(401)
            return as_json({"type": "user", "name": "reader", "auth": {}})
        if about := re.fullmatch(r"/api/([^/]+)/([^/]+/[^/]+)(?:/(.*))?", path):
            return self._about(*about.groups(default=""), token)
        if file := re.fullmatch(r"/(?:datasets/)?(.+)/resolve/([^/]+)/(.+)", path):
            return self._file(*file.groups(), token)
        if path not in self.others:
            raise RefusedError(404)
        return self.others[path], {}

    def _about(self, kind: str, name: str, part: str, token: str) -> Answer:
        """What the hub's API tells of a repository."""
        repository = self._repository(name, token, kind)
        if part.startswith("revision/"):
            check_revision(part.removeprefix("revision/"), repository)
        if part.startswith("tree"):
            sizes = {path: len(content) for path, content in repository.files.items()}
            return as_json(
                [
                    {"type": "file", "path": path, "size": size, "oid": path}
                    for path, size in sizes.items()
                ]
            )
        if part == "auth-check":
            check_access(name, repository, token)
            return as_json({})
        gated, files = (
            repository.gated is not None and "manual",
            [{"rfilename": path} for path in repository.files],
        )
        return as_json({"id": name, "sha": repository.commit, "gated": gated, "siblings": files})

    def _file(self, name: str, revision: str, path: str, token: str) -> Answer:
        repository = self._repository(name, token)
        check_access(name, repository, token)
        check_revision(revision, repository)
        if path not in repository.files:
            raise RefusedError(404, "EntryNotFound", "Entry not found", repository.commit)
        content = repository.files[path]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return content, {"X-Repo-Commit": repository.commit, "ETag": etag}

    def _repository(self, name: str, token: str, kind: str | None = None) -> Repository:
        found = self.repositories.get(name)
        if found is None or kind not in (None, found.kind):  # without login, it may be hidden
            raise RefusedError(404 if token else 401, "RepoNotFound", "Repository not found")
        return found


def check_access(name: str, repository: Repository, token: str) -> None:
    if repository.gated is not None and token not in repository.gated:
        raise RefusedError(
            403 if token else 401, "GatedRepo", f"Access to model {name} is restricted."
        )


def check_revision(revision: str, repository: Repository) -> None:
    if revision not in ("main", repository.commit):
        raise RefusedError(
            404, "RevisionNotFound", f"Invalid rev id: {revision}", repository.commit
        )


def as_json(value: Any) -> Answer:
    return json.dumps(value).encode(), {"Content-Type": "application/json"}


def handler_of(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    """The handler of requests to this hub. Each connection takes one request, as HTTP/1.0 has
    it.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, status = unquote(urlsplit(self.path).path), 200
            hub.requests.append((self.command, path))
            try:
                body, headers = hub.answer(
                    path, self.headers.get("Authorization", "").removeprefix("Bearer ")
                )
            except RefusedError as error:
                (body, _), headers, status = as_json({}), error.headers, error.status
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
