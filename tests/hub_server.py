"""A Hub on 127.0.0.1 for the real client of huggingface_hub: create, upload (LFS, no Xet), commit, list, download. It
answers what this project and its clients ask, and HTTP 501 to everything else. The fixture `hub` runs one."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


TOKENS = {"hf_user": "user", "hf_other": "other"}
LFS_SUFFIXES = (".bin", ".gz", ".model", ".npy", ".npz", ".onnx", ".parquet", ".png", ".pt", ".safetensors", ".zip")
PREFIXES = {"models": "", "datasets": "datasets/"}  # before a repository's id, by its type


@dataclass(frozen=True)
class Answer:
    """An answer to the client."""

    content: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def json_answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})


class HubError(Exception):
    """A refusal: HTTP status, the message that the client shows, and the code that selects its exception."""

    def __init__(self, status: int, message: str, code: str = "", commit: str = "") -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message, "X-Error-Code": code, "X-Repo-Commit": commit}
        self.answer = json_answer({"error": message}, status, {name: text for name, text in headers.items() if text})


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Blob:
    """The content of a file in a commit."""

    content: bytes
    is_lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git stores: the content, or the pointer to an LFS object."""
        size = len(self.content)
        lfs = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {size}\n".encode()
        return lfs if self.is_lfs else self.content

    @property
    def oid(self) -> str:
        """The hash that the client compares with its own file, and that names the cached file."""
        return self.sha256 if self.is_lfs else git_oid(self.pointer)

    def entry(self, path: str) -> dict[str, Any]:
        """The entry of a file, for listings (`path`, `oid`) and for repositories (`rfilename`, `blobId`)."""
        oid, size = git_oid(self.pointer), len(self.content)
        lfs = {"oid": self.sha256, "sha256": self.sha256, "size": size, "pointerSize": len(self.pointer)}
        names = {"type": "file", "path": path, "rfilename": path, "oid": oid, "blobId": oid}
        return {**names, "size": size, "lfs": lfs if self.is_lfs else None}


@dataclass(frozen=True)
class Commit:
    """All files at one time. `changed` are the sorted paths that differ from the parent's."""

    oid: str
    message: str
    date: str
    files: Mapping[str, Blob]
    changed: tuple[str, ...]


class Repo:
    """The commits of each branch, oldest first, those of `main` also as `history`, and the commits and authors of open
    pull requests, the first of which is `refs/pr/1`. The key is the id; that of a data set starts with `datasets/`."""

    def __init__(self, key: str, private: bool) -> None:
        self.key, self.private, self.history = key, private, list[Commit]()
        self.branches = {"main": self.history}
        self.proposals: list[tuple[Commit, str]] = []
        self.owner, self.name = key.split("/")[-2:]
        self.commit("initial commit", {".gitattributes": Blob(b"", False)})

    def resolve(self, revision: str) -> Commit:
        """The commit of a branch, of a pull request or of an oid."""
        for number, (commit, _) in enumerate(self.proposals, start=1):
            if revision in (f"refs/pr/{number}", commit.oid):
                return commit
        for branch, commits in self.branches.items():
            for commit in reversed(commits):
                if revision in (branch, commit.oid):
                    return commit
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def propose(self, author: str, message: str, files: Mapping[str, Blob]) -> None:
        """Open a pull request that adds files to the newest commit."""
        self.proposals.append((self.commit(message, {**self.history[-1].files, **files}), author))
        self.history.pop()

    def discussions(self, author: str) -> dict[str, Any]:
        """The open pull requests of an author."""
        repo = {"name": self.key, "type": "model"}
        pages = [
            {
                "title": commit.message, "num": number, "author": {"name": each}, "createdAt": commit.date,
                "status": "open", "repo": repo, "isPullRequest": True,
            }
            for number, (commit, each) in enumerate(self.proposals, start=1)
            if each == author
        ]  # fmt: skip
        return {"discussions": pages, "count": len(pages), "start": 0}

    def commit(self, message: str, files: Mapping[str, Blob], branch: str = "main") -> Commit:
        history = self.branches[branch]
        before = history[-1].files if history else {}
        changed = tuple(sorted(path for path in {*before, *files} if before.get(path) != files.get(path)))
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        oid = hashlib.sha1(f"{self.key} {branch} {len(history)} {date} {message} {changed}".encode()).hexdigest()
        history.append(Commit(oid, message, date, files, changed))
        return history[-1]

    def describe(self, revision: str, blobs: bool) -> dict[str, Any]:
        """The answer for `model_info` and `dataset_info`. With `blobs`, it has sizes and hashes of files."""
        commit = self.resolve(revision)
        entries = [blob.entry(path) if blobs else {"rfilename": path} for path, blob in commit.files.items()]
        names = {"id": f"{self.owner}/{self.name}", "author": self.owner, "private": self.private}
        return {**names, "sha": commit.oid, "lastModified": commit.date, "tags": [], "siblings": entries}


def contents(folder: Path) -> dict[str, Blob]:
    """The files of a folder."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): Blob(file.read_bytes(), False) for file in files}


def tree(files: Mapping[str, Blob]) -> list[dict[str, Any]]:
    """The entries of all files and folders, in the form of a listing."""
    entries = [blob.entry(path) for path, blob in files.items()]
    for folder in {str(folder) for path in files for folder in PurePosixPath(path).parents} - {"."}:
        entries.append({"type": "directory", "path": folder, "oid": git_oid(folder.encode()), "size": 0})
    return sorted(entries, key=lambda entry: entry["path"])


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

    def unknown(self) -> HubError:
        return HubError(501, f"This Hub does not know {self.method} /{'/'.join(self.segments)}")


@dataclass(frozen=True)
class Request:
    """A request that was answered, with the size of its body."""

    method: str
    path: str
    received: int
    status: int


class HubServer:
    """
    A Hub that runs inside `with HubServer() as hub:`. Its attributes may be changed at any time.

    Args:
        tokens (`Mapping[str, str]`): Token -> user, who owns the namespace of that name.
    """

    def __init__(self, tokens: Mapping[str, str] = TOKENS) -> None:
        self.tokens = tokens
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.objects: dict[str, bytes] = {}  # of LFS, by sha256
        self.uploads_left = math.inf  # objects of LFS that are accepted before uploads are refused
        self.lock = threading.Lock()
        self._port = _Port(self)
        self.url = f"http://127.0.0.1:{self._port.server_port}"
        self.storage_url = self.url.replace("127.0.0.1", "localhost")  # another origin, where the client has no token

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._port.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._port.shutdown()
        self._port.server_close()

    def environment(self, cache: Path, token: str | None = "hf_user") -> dict[str, str]:
        """Environment variables for a process that uses this Hub, with `cache` as `HF_HOME`."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_CACHE": str(cache / "hub"),
            "HF_MODULES_CACHE": str(cache / "modules"), "HF_TOKEN_PATH": str(cache / "token"), "HF_TOKEN": token or "",
            "HUGGING_FACE_HUB_TOKEN": "", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }  # fmt: skip

    def publish(self, repo: str, folder: Path) -> Repo:
        """Make a public repository of the files of a folder, without a client."""
        self.repos[repo] = Repo(repo, private=False)
        self.repos[repo].commit("files", contents(folder))
        return self.repos[repo]

    def commits(self, repo: str) -> list[Commit]:
        """The history, newest commit first."""
        return self.repos[repo].history[::-1]

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """All files of the newest commit."""
        return {path: blob.content for path, blob in self.repos[repo].resolve(branch).files.items()}

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
                return json_answer({"errors": [], "warnings": []})
            case ["POST", "api", "repos", "create"]:
                return self._create(call)
            case ["PUT", "lfs", oid]:
                if self.uploads_left <= 0:
                    raise HubError(403, "The URL of this upload has expired")
                self.uploads_left -= 1
                self.objects[oid] = call.body
                return json_answer({})
            case ["GET", "lfs", oid]:
                return Answer(self.objects[oid])
        key, rest = call.repo()
        repo = self.repos.get(key)
        if repo is None or (repo.private and call.user != repo.owner):
            raise HubError(401 if call.user is None else 404, "Repository not found", "RepoNotFound")
        return self._answer_reader(repo, call, rest) or self._answer_owner(repo, call, rest)

    def _answer_reader(self, repo: Repo, call: Call, rest: list[str]) -> Answer | None:
        match [call.method, *rest]:
            case ["GET"] | ["GET", "revision", _]:
                return json_answer(repo.describe(rest[1] if rest else "main", "blobs" in call.query))
            case ["GET", "commits", branch]:
                pages = [{"id": commit.oid, "title": commit.message, "message": "", "date": commit.date, "authors": []}
                         for commit in reversed(repo.branches[branch])]  # fmt: skip
                return json_answer(pages)
            case ["GET", "discussions"]:
                return json_answer(repo.discussions(*call.query["author"]))
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
        if not blob.is_lfs:
            return Answer(blob.content, headers=headers)
        linked = {"X-Linked-ETag": f'"{blob.oid}"', "X-Linked-Size": str(len(blob.content))}
        return Answer(status=302, headers={**headers, **linked, "Location": f"{self.storage_url}/lfs/{blob.sha256}"})

    def _answer_owner(self, repo: Repo, call: Call, rest: list[str]) -> Answer:
        call.require(repo.owner)
        match [call.method, *rest]:
            case ["POST", "preupload", revision]:
                files = repo.resolve(revision).files
                return json_answer({"files": [self._upload_mode(files, each) for each in call.json()["files"]]})
            case ["POST", "info", "lfs", "objects", "batch"]:
                return json_answer({"objects": [self._lfs_object(**each) for each in call.json()["objects"]]})
            case ["POST", "commit", branch]:
                header, *operations = (json.loads(line) for line in call.body.splitlines())
                files = self._after(repo.resolve(branch).files, operations)
                commit = repo.commit(header["value"]["summary"], files, branch)
                url = f"{self.url}/{repo.key}/commit/{commit.oid}"
                return json_answer({"commitUrl": url, "commitOid": commit.oid})
            case ["POST", "branch", name]:
                if name in repo.branches:
                    raise HubError(409, f"Reference already exists: {name}")
                repo.branches[name] = [repo.resolve(call.json()["startingPoint"])]
                return json_answer({})
        raise call.unknown()

    def _create(self, call: Call) -> Answer:
        wanted = call.json()
        owner = wanted["organization"] or call.user
        key = f"{PREFIXES[wanted.get('type', 'model') + 's']}{owner}/{wanted['name']}"
        call.require(owner)
        if key in self.repos:
            return json_answer({"error": "You already created this repository.", "url": f"{self.url}/{key}"}, 409)
        self.repos[key] = Repo(key, wanted.get("visibility") == "private")
        return json_answer({"url": f"{self.url}/{key}"})

    def _upload_mode(self, files: Mapping[str, Blob], wanted: Mapping[str, Any]) -> dict[str, Any]:
        path = wanted["path"]
        oid = files[path].oid if path in files else None
        mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _lfs_object(self, oid: str, size: int, **others: Any) -> dict[str, Any]:
        """Where to upload an object, if it is missing."""
        upload = {"actions": {"upload": {"href": f"{self.url}/lfs/{oid}"}}}
        return {"oid": oid, "size": size, **({} if oid in self.objects else upload)}

    def _after(self, files: Mapping[str, Blob], operations: Iterable[Any]) -> dict[str, Blob]:
        """The files after the operations of a commit, which are in the form of the client."""
        after = dict(files)
        for operation in operations:
            value = operation["value"]
            path = value["path"]
            match operation["key"]:
                case "file":
                    after[path] = Blob(base64.b64decode(value["content"]), False)
                case "lfsFile":
                    after[path] = Blob(self.objects[value["oid"]], True)
                case "deletedFile":
                    del after[path]
                case key:
                    raise HubError(400, f"A commit of this Hub has no operation {key!r}.")
        return after


def ranged(answer: Answer, header: str) -> Answer:
    """The part of an answer that a `Range` header requests."""
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", header)
    if wanted is None or answer.status != 200:
        return answer
    start, size = int(wanted[1]), len(answer.content)
    content = answer.content[start : int(wanted[2] or size) + 1]
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
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            with hub.lock:
                user = None if segments[0] == "lfs" else hub.user(self.headers.get("Authorization"))
                answer = hub.answer(Call(self.command, segments, parse_qs(url.query), body, user))
        except HubError as error:
            answer = error.answer
        answer = ranged(answer, self.headers.get("Range", ""))
        hub.requests.append(Request(self.command, self.path, len(body), answer.status))
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": len(answer.content), "Connection": "close"}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else answer.content)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def log_message(self, format: str, *args: object) -> None:
        """Silent: `HubServer.requests` is the log."""
