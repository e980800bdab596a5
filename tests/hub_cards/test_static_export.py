"""What a static table or a router cannot be exported from is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import environment
from transformers import AutoTokenizer

from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.router_export import export_router
from m3bert.hub_cards.static_export import export_static
from m3bert.modeling import M3BertModel
from m3bert.trainers import Granularity
from tests.conftest import tiny_config
from tests.static_checkpoints import break_row, save_static


@pytest.fixture
def static(tiny_tokenizer, tmp_path) -> Path:
    save_static(tmp_path / "model", tiny_tokenizer)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("no table", r"model has no static table: fit one with `m3bert fit`"),
        ("counted", "The tokenizer adds <s>, </s> to each text, which the static table counts"),
        ("nan", "has rows that are not finite in float32"),
    ],
)
def test_a_checkpoint_without_a_table_to_export_says_why(static, tiny_tokenizer, tmp_path, case, error):
    if case == "no table":
        M3BertModel(tiny_config()).save_pretrained(static)
    elif case == "counted":
        save_static(static, tiny_tokenizer, ignored=[1])
    else:
        break_row(static, AutoTokenizer.from_pretrained(static).convert_tokens_to_ids("and"))
    with pytest.raises(ValueError, match=error):
        export_static(Checkpoint(static), tmp_path / "static")
    assert not (tmp_path / "static").exists()


@pytest.mark.parametrize("layer", [1, 6])
def test_a_router_needs_an_exit_for_its_queries(static, tmp_path, layer):
    with pytest.raises(ValueError, match=f"Depth {layer} does not embed queries into .*; depths that do: 0, 2, 4"):
        export_router(Checkpoint(static), tmp_path / "router", Granularity(layer, 32))


def test_a_cut_to_the_table_is_exported_as_well(static, tmp_path, tiny_tokenizer):
    cut = tmp_path / "cut"
    M3BertModel.from_pretrained(static, output_layer=0, output_dim=16).save_pretrained(cut)
    tiny_tokenizer.save_pretrained(cut)
    assert export_static(Checkpoint(cut), tmp_path / "static") == Granularity(0, 16)


def test_versions_that_would_misread_a_table_in_8_bits_refuse_it(static, tmp_path, monkeypatch):
    """sentence-transformers 6.0 and 6.1 read the requirement, and would leave out the scales of the rows."""
    for dtype in ("float32", "int8"):
        export_static(Checkpoint(static), tmp_path / f"{dtype} table", dtype=dtype)
        export_router(Checkpoint(static), tmp_path / f"{dtype} router", dtype=dtype)
    monkeypatch.setattr(environment, "get_installed_version", lambda name: "6.1.0")
    for kind in ("table", "router"):
        SentenceTransformer(str(tmp_path / f"float32 {kind}"), device="cpu")
        with pytest.raises(ImportError, match="sentence-transformers>=6.2"):
            SentenceTransformer(str(tmp_path / f"int8 {kind}"), device="cpu")
