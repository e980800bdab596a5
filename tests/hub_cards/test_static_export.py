"""What a static table or a router cannot be exported from is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hub_cards.checkpoint import Checkpoint
from hub_cards.router_export import export_router
from hub_cards.static_export import export_static
from modeling_m3bert import M3BertModel
from tests.conftest import tiny_config, write_modules
from tests.static_checkpoints import break_row, save_static
from trainers import Granularity


@pytest.fixture
def static(tiny_tokenizer, tmp_path) -> Path:
    save_static(tmp_path / "model", tiny_tokenizer)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "int8"}, "dtype='int8' is unknown; legal values: float32, float16"),
        ({"dim": 7}, "output_dim=7 is not available here; legal values: 8, 16, 32"),
    ],
)
def test_bad_options_are_named(static, tmp_path, options, error):
    with pytest.raises(ValueError, match=error):
        export_static(Checkpoint(static), tmp_path / "static", **options)
    assert not (tmp_path / "static").exists()


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("no table", r"model has no static table: fit one with `m3bert fit`"),
        ("native", r"tiny-bert has no static table"),
        ("other tokenizer", "The tokenizer has 101 ids and the static table 99 rows: it is not the model's tokenizer"),
        ("counted", "The tokenizer adds <s>, </s> to each text, which the static table counts"),
        ("nan", "The row of the token 'and' is not finite in float32"),
        ("short", "max_seq_length=2 leaves no room beside 2 special tokens"),
    ],
)
def test_a_checkpoint_without_a_table_to_export_says_why(
    static, encoder_folder, tiny_tokenizer, tmp_path, case, error
):
    source = encoder_folder if case == "native" else static
    tokenizer = AutoTokenizer.from_pretrained(static)
    if case == "no table":
        M3BertModel(tiny_config()).save_pretrained(static)
    elif case == "other tokenizer":
        tokenizer.add_tokens([f"new{number}" for number in range(101 - len(tokenizer))])
        tokenizer.save_pretrained(static)
    elif case == "counted":
        save_static(static, tiny_tokenizer, ignored=[1])
    elif case == "nan":
        break_row(static, tokenizer.convert_tokens_to_ids("and"))
    elif case == "short":
        write_modules(static, width=32, max_length=2)
    with pytest.raises(ValueError, match=error) as caught:
        export_static(Checkpoint(source), tmp_path / "static")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "static").exists()


@pytest.mark.parametrize(
    ("changes", "size", "error"),
    [
        ({}, Granularity(1, 32), "Depth 1 does not embed queries into the space of depth 6; depths that do: 0, 2, 4"),
        ({}, Granularity(6, 32), "Depth 6 does not embed queries into the space of depth 6"),
        ({"norm_position": "pre"}, None, "M3BertModel has no native equivalent: it is pre-norm"),
    ],
)
def test_a_router_needs_exits_and_native_documents(tiny_tokenizer, tmp_path, changes, size, error):
    save_static(tmp_path / "model", tiny_tokenizer, **changes)
    with pytest.raises(ValueError, match=error):
        export_router(Checkpoint(tmp_path / "model"), tmp_path / "router", size)


def test_a_cut_to_the_table_is_exported_as_well(static, tmp_path, tiny_tokenizer):
    cut = tmp_path / "cut"
    M3BertModel.from_pretrained(static, output_layer=0, output_dim=16).save_pretrained(cut)
    tiny_tokenizer.save_pretrained(cut)
    assert export_static(Checkpoint(cut), tmp_path / "static") == Granularity(0, 16)
