"""What the Hub answers, in one line that says what to do."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hub_cards import upload
from hub_cards.upload import Publication, explain, published_card


def refusal(status: int, kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    """What the client raises for an answer of the Hub; its text has a token and a signed URL."""
    request = SimpleNamespace(url="https://storage/file?signature=secret", headers={"authorization": "hf_secret"})
    response = SimpleNamespace(status_code=status, headers={}, request=request)
    return kind("hf_secret at https://storage/file?signature=secret", response=response)


@pytest.mark.parametrize(
    "error, expected",
    [
        (refusal(401), "does not know this token (401): log in with `hf auth login`, or set HF_TOKEN"),
        (refusal(403), "may not write to user/model (403)"),
        (
            refusal(404, RepositoryNotFoundError),
            "no repository user/model on the Hub, or the token may not see it (404)",
        ),
        (refusal(404, RevisionNotFoundError), "has no branch 'v2' on the Hub: create it first"),
        (refusal(507), "free some space, or publish a smaller granularity (Options.granularity)"),
        (refusal(500), "with status 500; push again to continue where it stopped"),
        (ConnectionError("hf_secret"), "was interrupted (ConnectionError); push again to continue where it stopped"),
        (RuntimeError("hf_secret"), "was interrupted (RuntimeError); push again to continue"),
        (ValueError("a\nThe storage is full"), "The Hub refused user/model: The storage is full"),
    ],
    ids=str,
)
def test_a_refusal_is_explained_without_secrets(error, expected):
    said = explain(error, "user/model", "v2")
    assert expected in said and "secret" not in said and "\n" not in said


def test_a_refusal_behind_a_wrapper_is_found():
    try:
        try:
            raise refusal(403)
        except HfHubHTTPError as error:
            raise OSError("wrapped") from error
    except OSError as error:
        assert "(403)" in explain(error, "user/model", None)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as closed:  # bound but not listening: it refuses connections
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(upload, "HfApi", lambda token: HfApi(endpoint, token))
        with pytest.raises(OSError, match=r"upload to user/model was interrupted \(ConnectError\); .*again.*\.$"):
            Publication(tmp_path, "user/model", {}).upload(token="hf_secret")


def test_a_card_that_cannot_be_read_now_is_not_taken_for_none(monkeypatch):
    """Otherwise a push would replace what a person wrote there."""

    def fail(*_, **__):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(upload, "hf_hub_download", fail)
    with pytest.raises(OSError, match="card of user/model on the Hub cannot be read now: try again later"):
        published_card("user/model")


def test_a_repository_without_a_card_has_none(monkeypatch):
    def fail(*_, **__):
        raise refusal(404, RepositoryNotFoundError)

    monkeypatch.setattr(upload, "hf_hub_download", fail)
    assert published_card("user/model") is None


def test_the_listing_names_every_file_with_size_or_reason(tmp_path):
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model_2x8.onnx").write_bytes(b"." * 1234)
    publication = Publication(tmp_path, "user/model", {"optimizer.pt": "state of the training run"})
    assert publication.sizes() == {"onnx/model_2x8.onnx": 1234}
    assert [line.strip() for line in publication.listing().splitlines()] == [
        "user/model: 1 files, 1,234 bytes",
        "1,234  onnx/model_2x8.onnx",
        "stays here  optimizer.pt: state of the training run",
    ]
