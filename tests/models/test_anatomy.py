"""The anatomy of an encoder, and the one that its fit has stored."""

from __future__ import annotations

import pytest
from transformers import AutoModel

from m3bert.models import anatomy
from tests.elastic_repositories import save_elastic


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3"])
def test_a_stored_anatomy_is_read_at_every_size_and_not_probed(kind, tiny_tokenizer, tmp_path, monkeypatch):
    model = save_elastic(tmp_path / "elastic", tiny_tokenizer, kind)
    sizes = [{}, {"output_layer": 2}, {"output_layer": 4}]
    probed = [
        anatomy.anatomy_of(AutoModel.from_pretrained(tmp_path / "elastic", trust_remote_code=True, **size))
        for size in sizes
    ]
    anatomy.store_anatomy(model)
    model.save_pretrained(tmp_path / "stored")
    monkeypatch.delattr(anatomy, "_probe")
    for size, expected in zip(sizes, probed, strict=True):
        loaded = AutoModel.from_pretrained(tmp_path / "stored", trust_remote_code=True, **size)
        assert anatomy.anatomy_of(loaded) == expected
