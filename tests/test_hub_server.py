"""The real client against the local Hub: what is pushed comes back, and failures look like those of the real Hub."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from huggingface_hub import CommitOperationAdd, HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    BadRequestError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file

from modeling_m3bert import M3BertModel
from tests.conftest import HIDE_PROJECT, padded_batch, tiny_config
from tests.hub_repository import HubError, Store, apply_operations
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


def test_a_repository_is_private_if_that_was_asked_for(hub, api):
    api.create_repo("user/hidden", private=True)
    assert (hub.repos[REPO].private, hub.repos["user/hidden"].private) == (False, True)
    assert api.model_info("user/hidden").private
    api.update_repo_settings("user/hidden", private=False)
    assert not HfApi(endpoint=hub.url, token=False).model_info("user/hidden").private


def test_a_repository_is_created_once(hub, api):
    before = hub.commits(REPO)
    assert api.create_repo(REPO, exist_ok=True).repo_id == REPO
    with pytest.raises(HfHubHTTPError, match="already created") as error:
        api.create_repo(REPO)
    assert error.value.response.status_code == 409
    assert hub.commits(REPO) == before


def test_a_deleted_repository_is_gone(hub, api):
    api.delete_repo(REPO)
    assert not api.repo_exists(REPO)
    with pytest.raises(RepositoryNotFoundError):
        api.delete_repo(REPO)


def test_a_space_is_another_repository_than_the_model_of_its_name(hub, api):
    api.create_repo(REPO, repo_type="space", space_sdk="gradio")
    api.upload_file(path_or_fileobj=b"import gradio", path_in_repo="app.py", repo_id=REPO, repo_type="space")
    assert api.space_info(REPO).sdk == "gradio"
    assert hub.files(f"spaces/{REPO}")["app.py"] == b"import gradio"
    assert "app.py" not in hub.files(REPO)
    assert not api.file_exists(REPO, "app.py") and api.file_exists(REPO, "app.py", repo_type="space")


@pytest.mark.parametrize("chunk_size", [None, 1000])
def test_every_revision_of_a_folder_comes_back_byte_for_byte(hub, api, folder, tmp_path, chunk_size):
    hub.chunk_size = chunk_size
    first = api.upload_folder(repo_id=REPO, folder_path=folder).oid
    states = [contents(folder)]
    for name, size in [("model.safetensors", 3600), ("README.md", 50)]:
        (folder / name).write_bytes(b"---\n---\n" + random.randbytes(size).hex().encode())
        api.upload_folder(repo_id=REPO, folder_path=folder)
        states.append(contents(folder))
        if size == 3600:
            api.create_tag(REPO, tag="v1")
    parts = [size for oid, size in uploads(hub)]
    assert max(parts) == (chunk_size or 2 * 3600 + 8)
    printed = run_client(
        hub,
        f"""
        from huggingface_hub import snapshot_download
        for revision in ("{first}", "v1", "main"):
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


def test_the_same_folder_again_is_no_commit(hub, api, folder):
    first = api.upload_folder(repo_id=REPO, folder_path=folder)
    assert api.upload_folder(repo_id=REPO, folder_path=folder).oid == first.oid
    assert len(hub.commits(REPO)) == 2


def test_files_and_folders_are_deleted(hub, api, folder):
    api.upload_folder(repo_id=REPO, folder_path=folder)
    api.delete_folder("onnx", REPO)
    assert hub.commits(REPO)[0].changed == ("onnx/config.json", "onnx/model.onnx")
    api.delete_file("other.bin", REPO)
    assert hub.commits(REPO)[0].changed == ("other.bin",)
    with pytest.raises(RemoteEntryNotFoundError):
        api.delete_file("other.bin", REPO)


def test_a_listing_tells_what_is_there(hub, api, folder):
    api.upload_folder(repo_id=REPO, folder_path=folder)
    entries = {each.path: each for each in api.list_repo_tree(REPO, recursive=True)}
    assert set(entries) == {*contents(folder), ".gitattributes", "onnx"}
    assert not api.verify_repo_checksums(REPO, local_dir=folder).mismatches
    assert {path for path, each in entries.items() if path != "onnx" and each.lfs} == set(LARGE)
    assert [each.path for each in api.list_repo_tree(REPO, "onnx")] == ["onnx/config.json", "onnx/model.onnx"]
    assert "onnx" in [each.path for each in api.list_repo_tree(REPO)]
    assert [each.path for each in api.get_paths_info(REPO, ["onnx", "other.bin", "none"])] == ["onnx", "other.bin"]
    sizes = {each.rfilename: each.size for each in api.model_info(REPO, files_metadata=True).siblings}
    assert sizes.items() >= LARGE.items()
    assert api.model_info(REPO).siblings[0].size is None


def test_branches_tags_and_commits_are_listed(hub, api):
    api.create_branch(REPO, branch="dev/one")
    api.upload_file(path_or_fileobj=b"1", path_in_repo="a.txt", repo_id=REPO, revision="dev/one", commit_message="one")
    api.create_tag(REPO, tag="v1", revision="dev/one")
    refs = api.list_repo_refs(REPO)
    at = {each.name: each.target_commit for each in [*refs.branches, *refs.tags]}
    assert at == {"main": hub.commits(REPO)[0].oid, "dev/one": at["v1"], "v1": hub.commits(REPO, "dev/one")[0].oid}
    assert [each.title for each in api.list_repo_commits(REPO, revision="v1")] == ["one", "initial commit"]
    assert "a.txt" not in hub.files(REPO)
    with pytest.raises(HfHubHTTPError, match="already exists"):
        api.create_tag(REPO, tag="v1")
    api.create_tag(REPO, tag="v1", exist_ok=True)


def test_a_commit_on_a_parent_that_is_no_longer_the_newest_is_refused(hub, api):
    add = CommitOperationAdd("a.txt", b"1")
    parent = api.create_commit(REPO, [add], commit_message="1").oid
    api.create_commit(REPO, [CommitOperationAdd("a.txt", b"2")], commit_message="2", parent_commit=parent)
    with pytest.raises(HfHubHTTPError) as error:
        api.create_commit(REPO, [CommitOperationAdd("a.txt", b"3")], commit_message="3", parent_commit=parent)
    assert error.value.response.status_code == 412
    assert hub.files(REPO)["a.txt"] == b"2"


def test_a_commit_of_an_object_that_was_never_uploaded_is_refused(hub, api):
    add = CommitOperationAdd("a.bin", b"never")
    add._upload_mode, add._is_uploaded = "lfs", True
    with pytest.raises(BadRequestError, match="never uploaded"):
        api.create_commit(REPO, [add], commit_message="none")
    assert len(hub.commits(REPO)) == 1


def test_size_decides_which_files_are_large_too(hub, api):
    hub.lfs_threshold, hub.lfs_suffixes = 10, (".bin",)
    for name in ("small.txt", "large.txt", "small.bin", "small.safetensors"):
        api.upload_file(path_or_fileobj=b"." * (11 if name == "large.txt" else 10), path_in_repo=name, repo_id=REPO)
    large = {each.path for each in api.list_repo_tree(REPO) if each.lfs}
    assert large == {"large.txt", "small.bin"}


@pytest.mark.parametrize("limit", [{"after_objects": 1}, {"after_bytes": 1500}])
def test_after_an_interruption_only_what_is_missing_is_sent(hub, api, folder, limit):
    hub.interrupt_uploads(**limit)
    with pytest.raises(RuntimeError, match="Error while uploading"):
        api.upload_folder(repo_id=REPO, folder_path=folder)
    assert len(hub.commits(REPO)) == 1
    broken = [each for each in hub.requests if each.status is None]
    arrived, start = uploads(hub), len(hub.requests)
    assert len(broken) == 1 and len(arrived) < len(LARGE)
    assert len(arrived) == 1 if "after_objects" in limit else broken[0].received + sum(dict(arrived).values()) == 1500
    hub.resume_uploads()
    api.upload_folder(repo_id=REPO, folder_path=folder)
    assert sorted(size for _, size in arrived + uploads(hub, start)) == sorted(LARGE.values())
    assert hub.files(REPO).items() >= contents(folder).items()


def test_parts_of_an_interrupted_file_make_no_object(hub, api, folder):
    hub.chunk_size = 1000
    hub.interrupt_uploads(after_bytes=2500)
    with pytest.raises(RuntimeError, match="Error while uploading"):
        api.upload_folder(repo_id=REPO, folder_path=folder, allow_patterns="*.safetensors")
    oids, sizes = zip(*uploads(hub), strict=True)
    assert sizes == (1000, 1000) and oids[0] not in hub.store
    start = len(hub.requests)
    hub.resume_uploads()
    api.upload_folder(repo_id=REPO, folder_path=folder, allow_patterns="*.safetensors")
    assert uploads(hub, start) == [(oids[0], size) for size in (1000, 1000, 1000, 500)]


def test_a_broken_download_goes_on_where_it_broke(hub, api, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    api.upload_folder(repo_id=REPO, folder_path=folder)
    hub.interrupt_download(after_bytes=2500)
    start = len(hub.requests)
    path = hf_hub_download(REPO, "model.safetensors", endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == (folder / "model.safetensors").read_bytes()
    fetched = [(each.status, each.sent) for each in hub.requests[start:] if each.method == "GET"]
    assert fetched == [(200, 2500), (206, 1500)]


def test_the_storage_never_sees_a_token(hub, api, folder, tmp_path):
    api.upload_folder(repo_id=REPO, folder_path=folder)
    snapshot_download(REPO, endpoint=hub.url, token="hf_user", cache_dir=tmp_path / "cache")
    for at_storage in (True, False):
        seen = {each.authorized for each in hub.requests if each.path.startswith("/lfs/") == at_storage}
        assert seen == {not at_storage}


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
        lambda: other.delete_repo(REPO),
        lambda: other.create_tag(REPO, tag="v1"),
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


def test_a_card_without_metadata_is_warned_of(hub, api, folder):
    api.upload_folder(repo_id=REPO, folder_path=folder)
    (folder / "README.md").write_text("No metadata.\n")
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        api.upload_folder(repo_id=REPO, folder_path=folder)


def test_operations_of_a_commit_apply_all_or_none(tmp_path):
    store = Store(tmp_path / "objects", quota=None)
    files = {"a.txt": store.add(b"a"), "folder/b.txt": store.add(b"b"), "folder2/c.txt": store.add(b"c")}
    after = apply_operations(files, [{"key": "deletedFolder", "value": {"path": "folder/"}}], store)
    assert set(after) == {"a.txt", "folder2/c.txt"} and len(files) == 3
    delete = {"key": "deletedFile", "value": {"path": "a.txt"}}
    with pytest.raises(HubError, match="a.txt"):
        apply_operations(files, [delete, delete], store)
    assert len(files) == 3


def test_a_model_with_its_code_loads_from_an_empty_cache_at_a_tag(hub, tmp_path):
    model = M3BertModel(tiny_config()).eval()
    batch = padded_batch()
    save_file(batch, tmp_path / "batch.safetensors")
    api = HfApi(endpoint=hub.url, token="hf_user")
    api.create_repo(REPO, private=True)
    for tag, scale in (("v1", 1.0), ("v2", 2.0)):
        model.get_input_embeddings().weight.data *= scale
        model.save_pretrained(tmp_path / tag)
        api.upload_folder(repo_id=REPO, folder_path=tmp_path / tag)
        api.create_tag(REPO, tag=tag)
    run_client(
        hub,
        f"""
        import torch
        from safetensors.torch import load_file, save_file
        from transformers import AutoModel
        batch = load_file("batch.safetensors")
        for tag in ("v1", "v2"):
            model = AutoModel.from_pretrained("{REPO}", trust_remote_code=True, revision=tag).eval()
            with torch.no_grad():
                save_file({{"states": model(**batch).last_hidden_state}}, tag + ".safetensors")
        """,
        tmp_path / "home",
    )
    for tag in ("v1", "v2"):
        expected = M3BertModel.from_pretrained(tmp_path / tag).eval()
        with torch.no_grad():
            assert torch.equal(load_file(tmp_path / f"{tag}.safetensors")["states"], expected(**batch)[0])
    assert 501 not in {each.status for each in hub.requests}
