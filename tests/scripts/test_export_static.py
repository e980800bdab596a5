"""The command that exports a static table or a router."""

from __future__ import annotations

import pytest

from scripts import export
from tests.static_checkpoints import save_static


@pytest.fixture
def static(tiny_tokenizer, tmp_path) -> str:
    save_static(tmp_path / "model", tiny_tokenizer)
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--format", "static", "--dim", "16", "--dtype", "float16"], "0x16 of MODEL as StaticEmbedding"),
        (["--format", "static"], "0x32 of MODEL as StaticEmbedding"),
        (["--format=router"], "queries 0x32, documents 6x32 of MODEL"),
        (["--format", "router", "--granularity", "2x8", "--model_type", "roberta"], "queries 2x8, documents 6x8 of"),
    ],
)
def test_a_folder_is_written(static, tmp_path, capsys, options, printed):
    export.main([*options, "--model_name_or_path", static, "--output_dir", str(tmp_path / "out")])
    assert printed.replace("MODEL", static) in capsys.readouterr().out
    assert (tmp_path / "out" / "modules.json").is_file()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--format", "static", "--granularity", "4x32"], "--format static exports layer 0, not 4"),
        (["--format", "static", "--granularity", "0x32", "--dim", "32"], "either --granularity 0x384 or --dim 384"),
        (["--format", "static", "--granularity", "0x32@int8"], "0x32@int8: exports have no precision; write 0x32"),
        (["--format", "static", "--model_type", "bert"], "--model_type is for --format router"),
        (["--format", "static", "--dtype", "int8"], "dtype='int8' is unknown; legal values: float32, float16"),
        (["--format", "router", "--granularity", "2x8", "--dtype", "float16"], "2x8 is none"),
        (["--format", "router", "--output_dir", "FULL"], "is the source: name another folder"),
    ],
)
def test_bad_options_are_named(static, tmp_path, options, error):
    options = [static if word == "FULL" else word for word in options]
    where = [] if "--output_dir" in options else ["--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=error):
        export.main(["--model_name_or_path", static, *where, *options])
    assert not (tmp_path / "out").exists()
