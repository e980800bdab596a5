"""What a Hub stores: contents, commits, repositories, and a log of requests. `tests.hub_server` speaks HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any


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


@dataclass(frozen=True)
class Blob:
    """The content of a file in a commit. `git_oid` is git's hash of it, or of the pointer to an LFS object."""

    sha256: str
    size: int
    git_oid: str
    pointer_size: int | None = None

    @property
    def oid(self) -> str:
        """The hash that the client compares with its own file, and that names the cached file."""
        return self.git_oid if self.pointer_size is None else self.sha256

    def entry(self, path: str) -> dict[str, Any]:
        """The entry of a file, for listings (`path`, `oid`) and for repositories (`rfilename`, `blobId`)."""
        names = {"type": "file", "path": path, "rfilename": path, "oid": self.git_oid, "blobId": self.git_oid}
        lfs = {"oid": self.sha256, "sha256": self.sha256, "size": self.size, "pointerSize": self.pointer_size}
        return {**names, "size": self.size, "lfs": None if self.pointer_size is None else lfs}


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Store:
    """Contents by sha256, stored as files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def __contains__(self, sha256: str) -> bool:
        return (self.folder / sha256).exists()

    def read(self, sha256: str) -> bytes:
        return (self.folder / sha256).read_bytes()

    def add(self, content: bytes) -> Blob:
        sha256 = hashlib.sha256(content).hexdigest()
        (self.folder / sha256).write_bytes(content)
        return Blob(sha256, len(content), git_oid(content))

    def lfs_blob(self, sha256: str) -> Blob:
        if sha256 not in self:
            raise HubError(400, f"The LFS object {sha256} was never uploaded.")
        size = (self.folder / sha256).stat().st_size
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        return Blob(sha256, size, git_oid(pointer), len(pointer))


@dataclass(frozen=True)
class Commit:
    """All files at one time. `changed` are the sorted paths that differ from the parent's."""

    oid: str
    parent: str | None
    message: str
    date: str
    files: Mapping[str, Blob]
    changed: tuple[str, ...]


class Repo:
    """The commits of the branch `main`. The key is the id; that of a data set starts with `datasets/`."""

    def __init__(self, key: str, private: bool, attributes: Blob) -> None:
        self.key, self.private = key, private
        self.owner, self.name = key.split("/")[-2:]
        self.objects: dict[str, Commit] = {}
        self.branches: dict[str, str] = {}
        self.commit("main", "initial commit", {".gitattributes": attributes})

    def resolve(self, revision: str) -> Commit:
        """The commit of a branch or an oid."""
        oid = self.branches.get(revision, revision)
        if oid not in self.objects:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.objects[oid]

    def history(self, revision: str) -> list[Commit]:
        """The history of a revision, newest commit first."""
        commits = [self.resolve(revision)]
        while commits[-1].parent is not None:
            commits.append(self.objects[commits[-1].parent])
        return commits

    def commit(self, branch: str, message: str, files: Mapping[str, Blob]) -> Commit:
        """Commit these files to a branch."""
        if self.objects and branch not in self.branches:
            raise HubError(404, f"There is no branch {branch}", "RevisionNotFound")
        parent = self.branches.get(branch)
        before = {} if parent is None else self.objects[parent].files
        changed = tuple(sorted(path for path in {*before, *files} if before.get(path) != files.get(path)))
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        oid = hashlib.sha1(f"{self.key} {len(self.objects)} {date} {message} {changed}".encode()).hexdigest()
        self.objects[oid] = Commit(oid, parent, message, date, files, changed)
        self.branches[branch] = oid
        return self.objects[oid]

    def describe(self, revision: str, blobs: bool) -> dict[str, Any]:
        """The answer for `model_info` and `dataset_info`. With `blobs`, it has sizes and hashes of files."""
        commit = self.resolve(revision)
        entries = [blob.entry(path) if blobs else {"rfilename": path} for path, blob in commit.files.items()]
        names = {"id": f"{self.owner}/{self.name}", "author": self.owner, "private": self.private}
        return {**names, "sha": commit.oid, "lastModified": commit.date, "tags": [], "siblings": entries}


def apply_operations(files: Mapping[str, Blob], operations: Iterable[Any], store: Store) -> dict[str, Blob]:
    """The files after the operations of a commit, which are in the form of the client."""
    after = dict(files)
    for operation in operations:
        value = operation["value"]
        path = value["path"]
        match operation["key"]:
            case "file":
                after[path] = store.add(base64.b64decode(value["content"]))
            case "lfsFile":
                after[path] = store.lfs_blob(value["oid"])
            case "deletedFile" if path in after:
                del after[path]
            case "deletedFolder" if any(each.startswith(path) for each in after):  # such a path ends with a slash
                after = {each: blob for each, blob in after.items() if not each.startswith(path)}
            case "deletedFile" | "deletedFolder":
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            case key:
                raise HubError(400, f"A commit of this Hub has no operation {key!r}.")
    return after


def tree(files: Mapping[str, Blob]) -> list[dict[str, Any]]:
    """The entries of all files and folders, in the form of a listing."""
    entries = [blob.entry(path) for path, blob in files.items()]
    for folder in {str(folder) for path in files for folder in PurePosixPath(path).parents} - {"."}:
        inside = sorted((path, blob.git_oid) for path, blob in files.items() if path.startswith(f"{folder}/"))
        entries.append({"type": "directory", "path": folder, "oid": git_oid(json.dumps(inside).encode()), "size": 0})
    return sorted(entries, key=lambda entry: entry["path"])


@dataclass(frozen=True)
class Request:
    """A request, with the sizes of both bodies. `status` is `None` if the connection broke before an answer."""

    method: str
    path: str
    authorized: bool
    received: int
    sent: int
    status: int | None


@dataclass
class Interruption:
    """
    Accepts so many objects of LFS uploads, then breaks one connection, then refuses all uploads. The client retries a
    broken upload five times within 23 seconds, but accepts a refusal at once.
    """

    after_objects: float = math.inf
    oids: set[str] = field(default_factory=set)
    broken: bool = False

    def admit(self, oid: str, size: int) -> int:
        """How many bytes of an upload to read: fewer than `size` if the connection is to break."""
        if self.broken:
            raise HubError(403, "The URL of this upload has expired")
        self.oids.add(oid)
        admitted = size if len(self.oids) <= self.after_objects else size // 2
        self.broken = admitted < size
        return admitted
