"""A stand-in for the Hugging Face hub on the loopback, which answers `huggingface_hub`'s client like the hub.

Model info, file trees and files. Gated repositories show their list of files to all, but serve files only to users
with access. Left out: redirects to the hub's caches and storage, which the client follows by itself, and Xet.
"""

import hashlib
import http.server
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit


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

    asked: (method, path) of every request.
    """

    repositories: dict[str, Repository]
    others: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        if path in self.hub.others:
            return self.reply(200, self.hub.others[path])
        if path.startswith("/api/"):
            return self.api(path.removeprefix("/api/"))
        name, found, rest = path.removeprefix("/datasets/").lstrip("/").partition("/resolve/")
        return self.file(name, *rest.split("/", 1)) if found else self.refuse(404)

    @property
    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def api(self, path: str) -> None:
        if path == "whoami-v2":
            return self.json({"type": "user", "name": "reader", "auth": {}}) if self.token else self.refuse(401)
        kind, owner, name, *rest = [*path.split("/"), "", ""]
        repository = self.repository(f"{owner}/{name}", kind)
        if repository is None:
            return None
        if rest[0] == "tree":
            sizes = {path: len(content) for path, content in repository.files.items()}
            return self.json(
                [{"type": "file", "path": path, "size": size, "oid": path} for path, size in sizes.items()]
            )
        if rest[0] == "auth-check":
            return self.json({}) if self.may_read(f"{owner}/{name}", repository) else None
        about = {"id": f"{owner}/{name}", "sha": repository.commit, "gated": repository.gated is not None and "manual"}
        return self.json(about | {"siblings": [{"rfilename": path} for path in repository.files]})

    def file(self, name: str, revision: str, path: str) -> None:
        repository = self.repository(name)
        if repository is None or not self.may_read(name, repository):
            return None
        commit = {"X-Repo-Commit": repository.commit}
        if revision not in ("main", repository.commit):
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}", commit)
        if path not in repository.files:
            return self.refuse(404, "EntryNotFound", "Entry not found", commit)
        content = repository.files[path]
        return self.reply(200, content, commit | {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'})

    def repository(self, name: str, kind: str | None = None) -> Repository | None:
        """The repository, or None after answering that it is missing (without login: that it may be hidden)."""
        repository = self.hub.repositories.get(name)
        if repository is None or kind not in (None, repository.kind):
            return self.refuse(404 if self.token else 401, "RepoNotFound", "Repository not found")
        return repository

    def may_read(self, name: str, repository: Repository) -> bool:
        """Whether the user has access; if not, the refusal is sent."""
        if repository.gated is None or self.token in repository.gated:
            return True
        self.refuse(403 if self.token else 401, "GatedRepo", f"Access to model {name} is restricted.")
        return False

    def json(self, content: object) -> None:
        self.reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def refuse(self, status: int, code: str = "", message: str = "", headers: Mapping[str, str] | None = None) -> None:
        about = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
        self.reply(status, message.encode(), {**about, **(headers or {})})

    def reply(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""
