"""What is published of an elastic repository: the source's files as they are, exits, code, and a card that says so."""

import json
import re
import shlex
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from m3bert.commands import export
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.publication import Options, prepare, publish
from m3bert.models.auto import load_model
from m3bert.trainers import Granularity
from tests.elastic_repositories import VOCABULARY, save_elastic
from tests.published import save_with_exits


LOAD = """
import torch
from transformers import AutoModel
plain = AutoModel.from_pretrained({folder!r})
sizes = {{4: AutoModel.from_pretrained({folder!r}, trust_remote_code=True, output_layer=4)}}
print(plain.config.num_hidden_layers, sizes[4].config.num_hidden_layers, type(sizes[4]).__module__)
"""


@pytest.fixture
def repository(tmp_path, tiny_tokenizer) -> Path:
    save_elastic(tmp_path / "model", tiny_tokenizer)
    return tmp_path / "model"


def published(folder: Path, out: Path, **options: object) -> Checkpoint:
    out.mkdir()
    return Checkpoint(prepare(Checkpoint(folder), out, "user/model", Options(**options)).folder)


def test_all_files_of_the_source_are_published_as_they_are(repository, tmp_path, run_bare):
    """Also settings under an older name, and modules in a folder of another name."""
    (repository / "sentence_bert_config.json").rename(repository / "sentence_roberta_config.json")
    (repository / "1_Pooling").rename(repository / "pooling")
    file = repository / "modules.json"
    file.write_text(file.read_text().replace("1_Pooling", "pooling"))
    (repository / "notes.txt").write_text("private")
    checkpoint = published(repository, tmp_path / "out")
    names = {path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()}
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == names - {"notes.txt"} | {"README.md"}
    assert all((tmp_path / "out" / name).read_bytes() == (repository / name).read_bytes() for name in names & files)
    assert checkpoint.other_code() == [] and checkpoint.has_weights_of_source
    printed = run_bare(LOAD.format(folder=str(tmp_path / "out")))
    assert "6 4 transformers.models.bert.modeling_bert" in printed


def test_the_card_says_what_runs_at_a_depth_and_whose_the_weights_are(repository, tmp_path):
    card = (published(repository, tmp_path / "out").folder / "README.md").read_text()
    digest = sha256((repository / "model.safetensors").read_bytes()).hexdigest()
    assert "Depth 4 is a path: it runs the layers 1, 2, 5 and 6." in card
    assert f"SHA-256: `{digest}`" in card and "base_model: maker/encoder" in card
    assert 'AutoModel.from_pretrained("user/model", trust_remote_code=True, output_layer=4, output_dim=16)' in card


def test_the_card_says_that_weights_were_changed(repository, tmp_path):
    model = load_model(repository)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias.add_(1)
    model.save_pretrained(repository)
    checkpoint = published(repository, tmp_path / "out")
    card = (checkpoint.folder / "README.md").read_text()
    assert not checkpoint.has_weights_of_source
    assert "is not the file of [maker/encoder](https://huggingface.co/maker/encoder): its weights were changed" in card


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("kind", ["bert", "m3bert"])
def test_every_line_to_load_it_runs(kind, table, tmp_path, tiny_tokenizer, sentences, monkeypatch):
    """A card offers the exports that this checkpoint has, and their folders need no remote code."""
    if kind == "bert":
        save_elastic(tmp_path / "model", tiny_tokenizer, table=table)
    else:
        save_with_exits(tmp_path / "model", tiny_tokenizer, sentences, static=table)
    card = (published(tmp_path / "model", tmp_path / "out").folder / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```(\w+)\n(.*?)```", card.replace("user/model", str(tmp_path / "out")), re.DOTALL)
    space: dict = {}
    for code in (code for language, code in snippets if language == "python"):
        exec(code, space)
    (router,) = re.findall(r"`(SentenceTransformer\(modules=.*)`", card)
    exec(f"from sentence_transformers.sentence_transformer.modules import Router\nrouter = {router}", space)
    assert space["router"].encode_query(["a text"]).shape == (1, 32)
    (lines,) = (code for language, code in snippets if language == "bash")
    made = {}
    for line in lines.splitlines():
        command, name, *arguments = shlex.split(line, comments=True)
        made[arguments[arguments.index("--format") + 1]] = arguments
        assert (command, name) == ("m3bert", "export")
    plain = ["native", *(["static"] if table else []), "router"]
    assert [*made] == (plain if kind == "bert" else ["static"] if table else ["onnx"])
    for form, arguments in made.items():
        if form != "onnx":
            export.main(arguments)
            assert SentenceTransformer(form).encode(["open the file"]).shape == (1, 32)


@pytest.mark.parametrize("size", ["2x8", "4x16", "0x32", "6x8", "6x32"])
def test_one_granularity_is_published_as_a_smaller_repository(size, repository, tmp_path):
    granularity = Granularity.parse(size)
    checkpoint = published(repository, tmp_path / "out", granularity=granularity)
    assert checkpoint.full == granularity and checkpoint.needs_code == (size != "6x32")
    ids = torch.randint(5, VOCABULARY, (2, 9))
    sizes = {"output_layer": granularity.layer, "output_dim": granularity.dim}
    with torch.no_grad():
        expected = load_model(repository, **sizes).eval()(input_ids=ids).last_hidden_state
        assert torch.equal(checkpoint.load().eval()(input_ids=ids).last_hidden_state, expected)
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("Depth 4 is a path: it runs the layers 1, 2, 5 and 6." in card) == (size in ("4x16", "6x8", "6x32"))
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == granularity.dim


@pytest.mark.parametrize(
    ("format", "size", "kind"),
    [("native", "4x16", "Dense"), ("static", None, "StaticEmbedding"), ("router", "4x32", "Router")],
)
def test_other_formats_are_pushed_and_need_no_code(format, size, kind, repository, only_hub):
    options = Options(granularity=Granularity.parse(size) if size else None, format=format)
    publish(repository, "user/model", options, token="hf_user")
    files = only_hub.files("user/model")
    assert kind in {module["type"].rpartition(".")[2] for module in json.loads(files["modules.json"])}
    assert not [name for name in files if name.endswith(".py") or name.startswith("elastic/")]
    assert b'"user/model"' in files["README.md"]
