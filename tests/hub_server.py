"""A Hub on 127.0.0.1 for the real client of huggingface_hub: create, upload (LFS, no Xet), commit, list, download.

It has two ports, like the real Hub. The Hub itself knows the client by its token. For large files (LFS) it sends the
client to a storage with another origin, which must never see that token. The fixture `hub` runs one. It answers what
this project and its clients ask, and HTTP 501 to everything else.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_repository import (
    Answer,
    Blob,
    Commit,
    HubError,
    Interruption,
    Repo,
    Request,
    Store,
    apply_operations,
    json_answer,
    tree,
)


TOKENS = {"hf_user": "user", "hf_other": "other"}
LFS_THRESHOLD = 10_000_000  # bytes: larger files are LFS files, and so are those that end like this:
LFS_SUFFIXES = (".bin", ".gz", ".model", ".npy", ".npz", ".onnx", ".parquet", ".png", ".pt", ".safetensors", ".zip")
PREFIXES = {"models": "", "datasets": "datasets/"}  # before a repository's id, by its type


@dataclass(frozen=True)
class Call:
    """A request, with the segments of its path and the user of its token."""

    method: str
    segments: Sequence[str]
    query: Mapping[str, list[str]]
    body: bytes
    user: str | None

    def json(self) -> Any:
        return json.loads(self.body)

    def require(self, owner: str) -> None:
        """Refuse everybody but the owner of a namespace."""
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        if self.user != owner:
            raise HubError(403, f"You have no right to write to the namespace {owner}")

    def repo(self) -> tuple[str, list[str]]:
        """The key of the repository in the path, and the rest of the path."""
        match self.segments:
            case ["api", ("models" | "datasets") as kind, owner, name, *rest]:
                return f"{PREFIXES[kind]}{owner}/{name}", rest
            case ["datasets", owner, name, *rest]:
                return f"datasets/{owner}/{name.removesuffix('.git')}", rest
            case [owner, name, *rest]:
                return f"{owner}/{name.removesuffix('.git')}", rest
        raise self.unknown()

    def repo_of_body(self) -> str:
        """The key of the repository to create."""
        wanted = self.json()
        return f"{PREFIXES[wanted.get('type', 'model') + 's']}{wanted['organization'] or self.user}/{wanted['name']}"

    def unknown(self) -> HubError:
        return HubError(501, f"This Hub does not know {self.method} /{'/'.join(self.segments)}")


class HubServer:
    """
    A Hub that runs inside `with HubServer(folder) as hub:`. Its attributes may be changed at any time.

    Args:
        folder (`Path`): Folder for the contents, which must not exist.
        tokens (`Mapping[str, str]`): Token -> user, who owns the namespace of that name.
    """

    def __init__(self, folder: Path, *, tokens: Mapping[str, str] = TOKENS) -> None:
        self.store, self.tokens = Store(folder), tokens
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.interruption = Interruption()
        self._ports = [_Port(self), _Port(self)]
        self.url, self.storage_url = (f"http://127.0.0.1:{port.server_port}" for port in self._ports)

    def __enter__(self) -> HubServer:
        for port in self._ports:
            threading.Thread(target=port.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for port in self._ports:
            port.shutdown()
            port.server_close()

    def environment(self, cache: Path, token: str | None = "hf_user") -> dict[str, str]:
        """Environment variables for a process that uses this Hub, with `cache` as `HF_HOME`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_CACHE": str(cache / "hub"),
            "HF_MODULES_CACHE": str(cache / "modules"),
            "HF_TOKEN_PATH": str(cache / "token"),
            "HF_TOKEN": token or "",
            "HUGGING_FACE_HUB_TOKEN": "",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def commits(self, repo: str, revision: str = "main") -> list[Commit]:
        """The history of a revision, newest commit first."""
        return self.repos[repo].history(revision)

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """All files of a revision."""
        blobs = self.repos[repo].resolve(revision).files
        return {path: self.store.read(blob.sha256) for path, blob in blobs.items()}

    def interrupt_uploads(self, *, after_objects: int) -> None:
        """Accept only so many objects of LFS files until `resume_uploads`; see `Interruption`."""
        self.interruption = Interruption(after_objects)

    def resume_uploads(self) -> None:
        self.interruption = Interruption()

    def user(self, authorization: str | None) -> str | None:
        """The user of a token; `None` without a token."""
        if authorization is None:
            return None
        user = self.tokens.get(authorization.removeprefix("Bearer "))
        if user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return user

    def answer(self, call: Call) -> Answer:
        """The answer to a request; may raise a `HubError`."""
        match [call.method, *call.segments]:
            case ["GET", "api", "whoami-v2"] if call.user:
                return json_answer({"type": "user", "name": call.user, "orgs": []})
            case ["POST", "api", "validate-yaml"]:
                warning = {"message": "empty or missing yaml metadata in repo card"}
                has_yaml = call.json()["content"].startswith("---\n")
                return json_answer({"errors": [], "warnings": [] if has_yaml else [warning]})
            case ["POST", "api", "repos", "create"]:
                return self._create(call.repo_of_body(), call)
            case ["PUT", "lfs", oid]:
                return self._receive(oid, call.body)
            case ["GET", "lfs", oid]:
                return Answer(self.store.read(oid))
        key, rest = call.repo()
        repo = self._readable(key, call)
        return self._answer_reader(repo, call, rest) or self._answer_owner(repo, call, rest)

    def _readable(self, key: str, call: Call) -> Repo:
        """A repository that the user may read. Others get the same answer as for a missing one."""
        repo = self.repos.get(key)
        if repo is None or (repo.private and call.user != repo.owner):
            raise HubError(401 if call.user is None else 404, "Repository not found", "RepoNotFound")
        return repo

    def _answer_reader(self, repo: Repo, call: Call, rest: list[str]) -> Answer | None:
        match [call.method, *rest]:
            case ["GET"] | ["GET", "revision", _]:
                return json_answer(repo.describe(rest[1] if rest else "main", "blobs" in call.query))
            case ["GET", "tree", revision, *folder]:
                start = "".join(f"{each}/" for each in folder)
                inside = [each for each in tree(repo.resolve(revision).files) if each["path"].startswith(start)]
                if not inside:
                    raise HubError(404, f"There is no folder {start} in {revision}", "EntryNotFound")
                recursive = call.query["recursive"] == ["true"]
                return json_answer([each for each in inside if recursive or "/" not in each["path"][len(start) :]])
            case ["POST", "paths-info", revision]:
                wanted = parse_qs(call.body.decode())["paths"]
                return json_answer([each for each in tree(repo.resolve(revision).files) if each["path"] in wanted])
            case ["GET" | "HEAD", "resolve", revision, *path]:
                return self._resolve(repo.resolve(revision), "/".join(path))
        return None

    def _resolve(self, commit: Commit, path: str) -> Answer:
        blob = commit.files.get(path)
        if blob is None:
            raise HubError(404, "Entry not found", "EntryNotFound", commit.oid)
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.oid}"'}
        if blob.pointer_size is None:
            return Answer(self.store.read(blob.sha256), headers=headers)
        linked = {"X-Linked-ETag": f'"{blob.oid}"', "X-Linked-Size": str(blob.size)}
        return Answer(status=302, headers={**headers, **linked, "Location": f"{self.storage_url}/lfs/{blob.sha256}"})

    def _answer_owner(self, repo: Repo, call: Call, rest: list[str]) -> Answer:
        call.require(repo.owner)
        match [call.method, *rest]:
            case ["POST", "preupload", revision]:
                files = repo.resolve(revision).files
                return json_answer({"files": [self._upload_mode(files, each) for each in call.json()["files"]]})
            case ["POST", "info", "lfs", "objects", "batch"]:
                return json_answer({"objects": self._batch(call.json()["objects"])})
            case ["POST", "commit", branch] if "create_pr" not in call.query:
                return self._commit(repo, branch, *(json.loads(line) for line in call.body.splitlines()))
        raise call.unknown()

    def _create(self, key: str, call: Call) -> Answer:
        wanted = call.json()
        call.require(key.split("/")[-2])
        if key in self.repos:
            return json_answer({"error": "You already created this repository.", "url": f"{self.url}/{key}"}, 409)
        lines = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        private = wanted.get("visibility") == "private"
        self.repos[key] = Repo(key, private, self.store.add(lines.encode()))
        return json_answer({"url": f"{self.url}/{key}"})

    def _upload_mode(self, files: Mapping[str, Blob], wanted: Mapping[str, Any]) -> dict[str, Any]:
        path = wanted["path"]
        is_lfs = wanted["size"] > LFS_THRESHOLD or path.endswith(LFS_SUFFIXES)
        oid = files[path].oid if path in files else None
        return {"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False, "oid": oid}

    def _batch(self, objects: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Where to upload the missing objects."""
        answers = []
        for wanted in objects:
            upload = {"actions": {"upload": {"href": f"{self.storage_url}/lfs/{wanted['oid']}"}}}
            is_new = wanted["oid"] not in self.store
            answers.append({"oid": wanted["oid"], "size": wanted["size"], **(upload if is_new else {})})
        return answers

    def _receive(self, oid: str, content: bytes) -> Answer:
        if hashlib.sha256(content).hexdigest() != oid:
            raise HubError(400, f"What came as the LFS object {oid} has another sha256.")
        self.store.add(content)
        return json_answer({})

    def _commit(self, repo: Repo, branch: str, header: Mapping[str, Any], *operations: Mapping[str, Any]) -> Answer:
        files = apply_operations(repo.resolve(branch).files, operations, self.store)
        wanted = header["value"]
        commit = repo.commit(branch, wanted["summary"], files)
        return json_answer({"commitUrl": f"{self.url}/{repo.key}/commit/{commit.oid}", "commitOid": commit.oid})


def ranged(answer: Answer, header: str) -> Answer:
    """The part of an answer that a `Range` header requests."""
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", header)
    if wanted is None or answer.status != 200:
        return answer
    start, size = int(wanted[1]), len(answer.content)
    content = answer.content[start : int(wanted[2] or size) + 1]
    if not content:
        return Answer(status=416, headers={"Content-Range": f"bytes */{size}"})
    headers = {**answer.headers, "Content-Range": f"bytes {start}-{start + len(content) - 1}/{size}"}
    return replace(answer, content=content, status=206, headers=headers)


class _Port(ThreadingHTTPServer):
    request_queue_size = 64  # the client opens up to 8 connections at once

    def __init__(self, hub: HubServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    """Reads a request, lets the Hub answer it, records it, and sends the answer."""

    protocol_version = "HTTP/1.1"
    server: _Port

    def _handle(self) -> None:
        self.close_connection = True  # so that no connection outlives the Hub
        hub, url = self.server.hub, urlsplit(self.path)
        segments = [unquote(segment) for segment in url.path.strip("/").split("/")]
        is_storage = segments[0] == "lfs"
        size, body = int(self.headers.get("Content-Length", 0)), b""
        try:
            with hub.lock:
                is_upload = is_storage and self.command == "PUT"
                admitted = hub.interruption.admit(segments[1], size) if is_upload else size
            body = self.rfile.read(admitted)
            if admitted < size:
                return self._record(admitted, 0, None)
            with hub.lock:
                user = None if is_storage else hub.user(self.headers.get("Authorization"))
                answer = hub.answer(Call(self.command, segments, parse_qs(url.query), body, user))
        except HubError as error:
            body += self.rfile.read(size - len(body))  # a client that is still sending would not read the answer
            answer = error.answer
        self._send(ranged(answer, self.headers.get("Range", "")), size)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _send(self, answer: Answer, received: int) -> None:
        content = b"" if self.command == "HEAD" else answer.content
        self._record(received, len(content), answer.status)
        self.send_response(answer.status)
        headers = {**answer.headers, "Content-Length": str(len(answer.content)), "Connection": "close"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _record(self, received: int, sent: int, status: int | None) -> None:
        is_authorized = "Authorization" in self.headers
        self.server.hub.requests.append(Request(self.command, self.path, is_authorized, received, sent, status))

    def log_message(self, format: str, *args: object) -> None:
        """Silent: `HubServer.requests` is the log."""
