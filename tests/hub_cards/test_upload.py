"""What a push does when the Hub refuses or cannot be reached."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from m3bert.hub_cards import upload
from m3bert.hub_cards.upload import Publication, published_card


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as closed:  # bound but not listening: it refuses connections
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(upload, "HfApi", lambda token: HfApi(endpoint, token))
        with pytest.raises(OSError, match=r"user/model was not pushed; push again to continue") as error:
            Publication(tmp_path, "user/model", ["optimizer.pt"]).upload(token="hf_secret")
    assert "\n" not in str(error.value) and "hf_secret" not in str(error.value)


def test_a_card_that_cannot_be_read_now_is_not_taken_for_none(monkeypatch):
    """Otherwise a push would replace what a person wrote there."""
    answers = [LocalEntryNotFoundError("no connection")]

    def fail(*_, **__):
        raise answers[-1]

    monkeypatch.setattr(upload, "hf_hub_download", fail)
    with pytest.raises(OSError, match="no connection"):
        published_card("user/model")
    answers.append(RepositoryNotFoundError("none", response=SimpleNamespace(headers={}, request=None)))
    assert published_card("user/model") is None
