"""A stand-in for the Hugging Face hub on the loopback, which answers `huggingface_hub`'s client like the hub.

Model info, file trees and files. Gated repositories show their list of files to all, but serve files only to users
with access. Left out: redirects to the hub's caches and storage, which the client follows by itself, and Xet.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response

from tests.eval.serving.in_thread import served


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
    """repositories: by hub id. others: content by path, for other sites (LongBench's templates on GitHub).

    asked: (method, path) of every request.
    """

    repositories: dict[str, Repository]
    others: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._served = served(app_of(self))
        self.url = self._served.__enter__()

    def close(self) -> None:
        self._served.__exit__(None, None, None)


def app_of(hub: HubServer) -> FastAPI:
    app = FastAPI()

    def token(request: Request) -> str:
        return request.headers.get("Authorization", "").removeprefix("Bearer ")

    def refusal(status: int, code: str, message: str, commit: str = "") -> HTTPException:
        return HTTPException(
            status, headers={"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}
        )

    def repository_of(name: str, request: Request, kind: str | None = None) -> Repository:
        found = hub.repositories.get(name)
        if found is None or kind not in (None, found.kind):  # without login, it may be hidden
            raise refusal(404 if token(request) else 401, "RepoNotFound", "Repository not found")
        return found

    def check_access(name: str, repository: Repository, request: Request) -> None:
        if repository.gated is not None and token(request) not in repository.gated:
            raise refusal(403 if token(request) else 401, "GatedRepo", f"Access to model {name} is restricted.")

    def check_revision(revision: str, repository: Repository) -> None:
        if revision not in ("main", repository.commit):
            raise refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}", repository.commit)

    @app.middleware("http")
    async def noted(request: Request, answer: Any) -> Response:
        hub.asked.append((request.method, request.scope["path"]))
        return await answer(request)

    @app.get("/api/whoami-v2")
    def user(request: Request) -> Any:
        if not token(request):
            raise HTTPException(401)
        return {"type": "user", "name": "reader", "auth": {}}

    @app.get("/api/{kind}/{owner}/{name}")
    @app.get("/api/{kind}/{owner}/{name}/{part:path}")
    def about(kind: str, owner: str, name: str, request: Request, part: str = "") -> Any:
        repository = repository_of(f"{owner}/{name}", request, kind)
        if part.startswith("revision/"):
            check_revision(part.removeprefix("revision/"), repository)
        if part.startswith("tree"):
            sizes = {path: len(content) for path, content in repository.files.items()}
            return [{"type": "file", "path": path, "size": size, "oid": path} for path, size in sizes.items()]
        if part == "auth-check":
            check_access(f"{owner}/{name}", repository, request)
            return {}
        gated, files = repository.gated is not None and "manual", [{"rfilename": path} for path in repository.files]
        return {"id": f"{owner}/{name}", "sha": repository.commit, "gated": gated, "siblings": files}

    @app.api_route("/{site:path}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    def file(site: str, revision: str, path: str, request: Request) -> Response:
        name = site.removeprefix("datasets/")
        repository = repository_of(name, request)
        check_access(name, repository, request)
        check_revision(revision, repository)
        commit = repository.commit
        if path not in repository.files:
            raise refusal(404, "EntryNotFound", "Entry not found", commit)
        content = repository.files[path]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return Response(content, headers={"X-Repo-Commit": commit, "ETag": etag})

    @app.api_route("/{path:path}", methods=["GET", "HEAD"])
    def other(path: str) -> Response:
        if f"/{path}" not in hub.others:
            raise HTTPException(404)
        return Response(hub.others[f"/{path}"])

    return app
