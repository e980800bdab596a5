"""The real client against the local Hub: what is pushed comes back, and failures look like those of the real Hub."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.conftest import HIDE_PROJECT
from tests.hub_server import HubServer


REPO = "user/tiny"
LARGE = {"model.safetensors": 3500, "onnx/model.onnx": 900, "other.bin": 1000}


@pytest.fixture(autouse=True)
def client_may_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of `HubServer.environment`, for a client that is already imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    """The client of a user who has a repository."""
    api = HfApi(endpoint=hub.url, token="hf_user")
    api.create_repo(REPO)
    return api


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with small, large and empty files, some in a subfolder."""
    folder = tmp_path / "folder"
    contents = {path: random.randbytes(size) for path, size in LARGE.items()}
    contents |= {"README.md": b"---\nlicense: mit\n---\nA card.\n", "onnx/config.json": b"{}", "empty.bin": b""}
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def contents(folder: Path | str) -> dict[str, bytes]:
    """All files of a folder except the one that the Hub adds."""
    files = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != ".gitattributes"}


def uploads(hub: HubServer, start: int = 0) -> list[tuple[str, int]]:
    """Name and size of every upload to the storage that arrived, from the given request on."""
    sent = [each for each in hub.requests[start:] if each.method == "PUT" and each.path.startswith("/lfs/")]
    return [(each.path.split("/")[2], each.received) for each in sent if each.status == 200]


def run_client(hub: HubServer, code: str, cache: Path, token: str | None = "hf_user") -> str:
    """Run code in a process that uses this Hub and an empty cache, without the project; returns its output."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", HIDE_PROJECT + textwrap.dedent(code)],
        cwd=cache.parent,
        env={**os.environ, **hub.environment(cache, token)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_revision_of_a_folder_comes_back_byte_for_byte(hub, api, folder, tmp_path):
    first = api.upload_folder(repo_id=REPO, folder_path=folder).oid
    states = [contents(folder)]
    for name, size in [("model.safetensors", 3600), ("README.md", 50)]:
        (folder / name).write_bytes(b"---\n---\n" + random.randbytes(size).hex().encode())
        api.upload_folder(repo_id=REPO, folder_path=folder)
        states.append(contents(folder))
    second = hub.commits(REPO)[1].oid
    printed = run_client(
        hub,
        f"""
        from huggingface_hub import snapshot_download
        for revision in ("{first}", "{second}", "main"):
            print(snapshot_download("{REPO}", revision=revision))
        """,
        tmp_path / "home",
        token=None,
    )
    assert [contents(snapshot) for snapshot in printed.split()] == states
    assert all(snapshot.startswith(str(tmp_path / "home")) for snapshot in printed.split())


def test_only_the_file_that_changed_is_uploaded_and_committed(hub, api, folder):
    api.upload_folder(repo_id=REPO, folder_path=folder)
    assert sorted(size for _, size in uploads(hub)) == sorted(LARGE.values())
    before, start = hub.commits(REPO), len(hub.requests)
    (folder / "README.md").write_text("---\nlicense: mit\n---\nAnother card.\n")
    api.upload_folder(repo_id=REPO, folder_path=folder, commit_message="card")
    newest, *older = hub.commits(REPO)
    assert older == before
    assert (newest.message, newest.changed, newest.parent) == ("card", ("README.md",), before[0].oid)
    assert uploads(hub, start) == []


def test_after_an_interruption_only_what_is_missing_is_sent(hub, api, folder):
    hub.interrupt_uploads(after_objects=1)
    with pytest.raises(RuntimeError, match="Error while uploading"):
        api.upload_folder(repo_id=REPO, folder_path=folder)
    assert len(hub.commits(REPO)) == 1
    broken = [each for each in hub.requests if each.status is None]
    arrived, start = uploads(hub), len(hub.requests)
    assert len(broken) == len(arrived) == 1 < len(LARGE)
    hub.resume_uploads()
    api.upload_folder(repo_id=REPO, folder_path=folder)
    assert sorted(size for _, size in arrived + uploads(hub, start)) == sorted(LARGE.values())
    assert hub.files(REPO).items() >= contents(folder).items()


def test_a_full_storage_refuses_files_of_both_kinds(hub, api, folder):
    hub.store.quota = 5000
    with pytest.raises(ValueError, match="quota"):
        api.upload_folder(repo_id=REPO, folder_path=folder)
    assert uploads(hub) == []
    with pytest.raises(HfHubHTTPError, match="quota") as error:
        api.upload_file(path_or_fileobj=b"." * 5000, path_in_repo="a.txt", repo_id=REPO)
    assert error.value.response.status_code == 507
    assert len(hub.commits(REPO)) == 1
    hub.store.quota = None
    api.upload_folder(repo_id=REPO, folder_path=folder)
    assert hub.files(REPO).items() >= contents(folder).items()


@pytest.mark.parametrize("token", [False, "hf_other"])
def test_a_private_repository_is_not_found_by_others(hub, api, tmp_path, token):
    api.create_repo("user/hidden", private=True)
    stranger = HfApi(endpoint=hub.url, token=token)
    for repo in ("user/hidden", "user/none"):
        with pytest.raises(RepositoryNotFoundError) as error:
            stranger.model_info(repo)
        assert error.value.response.status_code == (404 if token else 401)
        with pytest.raises(RepositoryNotFoundError):
            hf_hub_download(repo, "a.txt", endpoint=hub.url, token=token, cache_dir=tmp_path / "cache")
    assert api.model_info("user/hidden").id == "user/hidden"


def test_an_unknown_token_is_refused(hub, api):
    wrong = HfApi(endpoint=hub.url, token="hf_wrong")
    for call in (wrong.whoami, lambda: wrong.model_info(REPO), lambda: wrong.create_repo("user/more")):
        with pytest.raises(HfHubHTTPError) as error:
            call()
        assert error.value.response.status_code == 401
        assert not isinstance(error.value, RepositoryNotFoundError)
    assert api.whoami()["name"] == "user"


def test_nobody_writes_to_the_namespace_of_another(hub, api):
    other = HfApi(endpoint=hub.url, token="hf_other")
    for call in (
        lambda: other.create_repo("user/more"),
        lambda: other.upload_file(path_or_fileobj=b"1", path_in_repo="a.txt", repo_id=REPO),
    ):
        with pytest.raises(HfHubHTTPError, match="namespace user") as error:
            call()
        assert error.value.response.status_code == 403
    assert len(hub.commits(REPO)) == 1 and other.model_info(REPO).id == REPO


def test_missing_files_and_revisions_are_told_apart(hub, api, tmp_path):
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download(REPO, "none.txt", endpoint=hub.url, cache_dir=tmp_path)
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download(REPO, "none.txt", revision="none", endpoint=hub.url, cache_dir=tmp_path)
    with pytest.raises(RevisionNotFoundError):
        api.upload_file(path_or_fileobj=b"1", path_in_repo="a.txt", repo_id=REPO, revision="none")
