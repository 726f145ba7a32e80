"""A stand-in for the Hugging Face hub on the loopback, which answers `huggingface_hub`'s client like the hub.

Model info, file tree, and files with redirects: small ones to the hub's own resolve cache, large ones to a storage host
that must not see the token. Gated repositories show their list of files to everybody, but serve files only to users
with access. Left out: Xet storage, which the client uses only if an answer names a Xet hash.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pth", ".zip", "tokenizer.model")  # kept outside git, by their sha256


@dataclass(frozen=True)
class Repository:
    """files: content by path. gated: the tokens with access; None if everybody has it."""

    files: Mapping[str, bytes]
    kind: str = "models"
    gated: frozenset[str] | None = None
    commit: str = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """repositories: by hub id. others: content by path, for other sites (LongBench's templates on GitHub).

    asked: (method, path) of every request. leaked: storage paths that were asked for with a token.
    """

    repositories: dict[str, Repository]
    others: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    @property
    def storage_url(self) -> str:
        """The same server under another host name, as large files do not come from the hub's host."""
        return f"http://localhost:{self.http.server_port}/storage"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: HubServer

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        for prefix, answer in (("/storage/", self.storage), ("/api/resolve-cache/", self.cached), ("/api/", self.api)):
            if path.startswith(prefix):
                return answer(path.removeprefix(prefix))
        if path in self.hub.others:
            return self.reply(self.hub.others[path])
        name, found, rest = path.removeprefix("/datasets/").lstrip("/").partition("/resolve/")
        return self.resolve(name, *rest.split("/", 1)) if found else self.refuse(404, "", "Not found")

    # ---------------------------------------------------------------------------------------------------------- the API

    def api(self, path: str) -> None:
        if path == "whoami-v2":
            known = self.token is not None
            return self.json({"type": "user", "name": "reader", "auth": {}}) if known else self.refuse(401, "", "Who?")
        if path.count("/") < 2:
            return self.refuse(404, "", "Not found")
        kind, owner, name, *rest = path.split("/")
        repository = self.repository(f"{owner}/{name}", kind)
        if repository is None:
            return None
        if rest[:1] == ["tree"]:
            return self.json([_entry(name, content) for name, content in repository.files.items()])
        if rest == ["auth-check"]:
            return self.json({}) if self.may_read(f"{owner}/{name}", repository) else None
        about = {"id": f"{owner}/{name}", "sha": repository.commit, "gated": repository.gated is not None and "manual"}
        return self.json(about | {"siblings": [{"rfilename": name} for name in repository.files]})

    # ------------------------------------------------------------------------------------------------------------ files

    def resolve(self, name: str, revision: str, file: str) -> None:
        """A file's metadata and location."""
        repository = self.repository(name)
        if repository is None or not self.may_read(name, repository):
            return None
        commit = {"X-Repo-Commit": repository.commit}
        if revision not in ("main", repository.commit):
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}", commit)
        if file not in repository.files:
            return self.refuse(404, "EntryNotFound", "Entry not found", commit)
        content = repository.files[file]
        sha256 = hashlib.sha256(content).hexdigest()
        if file.endswith(LARGE):
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{sha256}"'}
            return self.redirect(302, f"{self.hub.storage_url}/{name}/{sha256}", commit | linked)
        return self.redirect(307, f"/api/resolve-cache/{name}/{repository.commit}/{file}", commit)

    def cached(self, path: str) -> None:
        owner, name, commit, file = path.split("/", 3)
        content = self.hub.repositories[f"{owner}/{name}"].files[file]
        self.reply(content, {"ETag": f'"{_git_id(content)}"', "X-Repo-Commit": commit})

    def storage(self, path: str) -> None:
        if self.token is not None:
            self.hub.leaked.append(path)
        name, _, sha256 = path.rpartition("/")
        files = self.hub.repositories[name].files.values()
        self.reply(next(content for content in files if hashlib.sha256(content).hexdigest() == sha256))

    # ---------------------------------------------------------------------------------------------------------- answers

    @property
    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def repository(self, name: str, kind: str | None = None) -> Repository | None:
        """The repository, or None after answering that it is missing (without login: that it may be hidden)."""
        found = self.hub.repositories.get(name)
        if found is None or kind not in (None, found.kind):
            return self.refuse(401 if self.token is None else 404, "RepoNotFound", "Repository not found")
        return found

    def may_read(self, name: str, repository: Repository) -> bool:
        """Whether the user has access; if not, the refusal is sent."""
        if repository.gated is None or self.token in repository.gated:
            return True
        self.refuse(401 if self.token is None else 403, "GatedRepo", f"Access to model {name} is restricted.")
        return False

    def json(self, content: object) -> None:
        self.reply(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def redirect(self, status: int, where: str, headers: Mapping[str, str]) -> None:
        self.reply(b"", {"Location": where, **headers}, status)

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        about = {"X-Error-Code": code, "X-Error-Message": message}
        self.reply(message.encode(), {**{key: text for key, text in about.items() if text}, **(headers or {})}, status)

    def reply(self, content: bytes, headers: Mapping[str, str] | None = None, status: int = HTTPStatus.OK) -> None:
        self.send_response(status)
        for key, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def _entry(path: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": _git_id(content)}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
