"""The command that exports a plain BERT, a static table, or a router."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from m3bert.commands import export
from m3bert.commands.convert import convert
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.trainers import Granularity
from tests.conftest import refused
from tests.elastic_repositories import save_elastic
from tests.static_checkpoints import save_static


@pytest.fixture
def elastic(minilm, tmp_path) -> str:
    convert(minilm, str(tmp_path / "elastic"))
    return str(tmp_path / "elastic")


def test_a_granularity_becomes_a_plain_bert(elastic, tmp_path, capsys, run_bare):
    arguments = ["--format", "native", "--model_name_or_path", elastic, "--granularity", "4x64"]
    export.main([*arguments, "--output_dir", str(tmp_path / "native")])
    assert f"BertModel, 4x64 of {elastic}. It needs no remote code." in capsys.readouterr().out
    assert Checkpoint(tmp_path / "native").full == Granularity(4, 64)
    printed = run_bare(
        """
        from sentence_transformers import SentenceTransformer
        model = SentenceTransformer("native")
        print(type(model[0].auto_model).__name__, model.encode(["one text"]).shape, model.max_seq_length)
        """
    )
    assert "BertModel (1, 64) 256" in printed


def test_the_model_type_can_be_chosen(elastic, tmp_path, minilm):
    """RoBERTa's positions begin after the padding token's, so its output is equal where no text is padded."""
    options = ["--format=native", "--model_name_or_path", elastic, "--model_type", "roberta"]
    export.main([*options, "--output_dir", str(tmp_path / "native")])
    native = AutoModel.from_pretrained(tmp_path / "native")
    inputs = AutoTokenizer.from_pretrained(minilm)(["one text"], return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        states, expected = (model(**inputs)[0] for model in (native, AutoModel.from_pretrained(elastic)))
    assert type(native).__name__ == "RobertaModel" and torch.equal(states, expected)


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--format", "static", "--granularity", "0x16", "--dtype", "float16"], "0x16 of MODEL as StaticEmbedding"),
        (["--format", "static"], "0x32 of MODEL as StaticEmbedding"),
        (["--format=router"], "queries 0x32, documents 6x32 of MODEL"),
        (["--format", "router", "--granularity", "2x8"], "queries 2x8, documents 6x8 of MODEL"),
    ],
)
def test_a_table_or_both_sides_of_a_search_are_written(tiny_tokenizer, tmp_path, capsys, options, printed):
    model, folder = tmp_path / "model", tmp_path / "out"
    save_static(model, tiny_tokenizer)
    export.main([*options, "--model_name_or_path", str(model), "--output_dir", str(folder)])
    assert printed.replace("MODEL", str(model)) in capsys.readouterr().out
    assert (folder / "modules.json").is_file()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--format", "native", "--output_dir", "MODEL"], "is the source: name another folder"),
        (["--format", "static", "--granularity", "4x32"], "--format static exports layer 0, not 4"),
        (["--format", "native", "--model", "CODE"], "runs code of its source, evil.Model: read it, then pass --trust"),
    ],
)
def test_what_would_be_something_else_is_refused(elastic, tmp_path, tiny_tokenizer, options, error):
    if "CODE" in options:
        save_elastic(tmp_path / "code", tiny_tokenizer)
        config = tmp_path / "code" / "config.json"
        code = '"elastic": {"source_auto_map": {"AutoModel": "evil.Model"},'
        config.write_text(config.read_text().replace('"elastic": {', code))
    options = [{"MODEL": elastic, "CODE": str(tmp_path / "code")}.get(word, word) for word in options]
    where = [] if "--output_dir" in options else ["--output_dir", str(tmp_path / "out")]
    refused(error, export.main, ["--model_name_or_path", elastic, *where, *options])
    assert not (tmp_path / "out").exists()
