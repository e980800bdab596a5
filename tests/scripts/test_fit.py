"""`m3bert fit` of native encoders and m3BERTs, the fit while converting, and what they refuse."""

import json
import re
import shutil
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, models
from transformers import CONFIG_MAPPING, AutoModel, AutoTokenizer, BertConfig, BertModel

import m3bert
from m3bert.commands.convert import main as convert
from m3bert.commands.export import main as export_main
from m3bert.commands.fit import layers_of_depth, main as fit
from m3bert.evaluation import GridEncoder
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.files import files_of
from m3bert.hub_cards.publication import Options, prepare
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.models.auto import load_model
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Granularity
from tests.conftest import refused, save, write_modules
from tests.exits.test_fit import pooled, random_texts
from tests.scripts.test_join import index_of, write_rows


@pytest.fixture
def source(tmp_path, tiny_tokenizer):
    """A tiny BERT that pools by the first token, with prompts."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=99, hidden_size=20, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=48, initializer_range=0.5,
    )  # fmt: skip
    settings = {"max_length": 32, "pooling": "cls", "prompts": {"query": "name: ", "document": "text: "}}
    return str(save(tmp_path / "source", BertModel(config), tiny_tokenizer, **settings))


@pytest.fixture
def files(tmp_path):
    (tmp_path / "lines.txt").write_text("\n".join(random_texts(60)) + "\n")
    rows = [{"body": text} for text in random_texts(60, seed=1)] + [{"body": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "lines.txt"), str(tmp_path / "rows.jsonl")


def test_convert_and_fit_at_once_is_convert_and_then_fit(source, files, tmp_path, capsys):
    convert([source, str(tmp_path / "once"), "--fit_exits", files[0], "--depths", "1-1", "1-2"])
    printed = capsys.readouterr().out
    assert "Fitted to 60 texts (target: last layer, basis: last_layer, pooling: cls)" in printed
    convert([source, str(tmp_path / "plain")])
    fit([str(tmp_path / "plain"), str(tmp_path / "twice"), "--files", files[0], "--depths", "1-1", "1-2"])
    once, twice = (AutoModel.from_pretrained(tmp_path / name) for name in ("once", "twice"))
    assert Elasticity.of(once.config) == Elasticity.of(twice.config) and Elasticity.of(once.config).exits == [0, 1, 2]
    assert Elasticity.of(once.config).fit["prompts"] == ["name: ", "text: "]
    for name, tensor in once.state_dict().items():
        assert torch.equal(twice.state_dict()[name], tensor)
    assert EmbeddingSettings.read(str(tmp_path / "once")).pooling == "cls"


def contents(folder: Path) -> dict[str, object]:
    """The content of each file; the order of the metadata of safetensors is random."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    read = {".safetensors": lambda file: {name: tensor.tolist() for name, tensor in load_file(file).items()}}
    return {str(file.relative_to(folder)): read.get(file.suffix, Path.read_bytes)(file) for file in files}


@pytest.mark.parametrize(("basis", "reads"), [("last_layer", "no exit"), ("principal", "hidden state")])
def test_the_report_says_whether_a_path_has_an_exit(source, files, tmp_path, capsys, basis, reads):
    fit([source, str(tmp_path / "out"), "--files", files[0], "--depths", "1,3", "--basis", basis])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    exits = {row[0]: " ".join(row[2:4]) for row in rows if row[:2] in (["2", "1,3"], ["3", "1-3"])}
    assert exits == {"2": reads, "3": reads}
    config = AutoModel.from_pretrained(tmp_path / "out").config
    assert Elasticity.of(config).exits == ([0] if basis == "last_layer" else [0, 2, 3])


def test_the_function_writes_what_the_command_writes(source, files, tmp_path):
    fit([source, str(tmp_path / "command"), "--files", files[0], "--depths", "1-1", "2,3"])
    texts, options = m3bert.TextFiles([files[0]]), m3bert.FitOptions(layers=[1], paths={2: [2, 3]})
    fitted = m3bert.fit(source, tmp_path / "function", texts, options)
    assert contents(tmp_path / "function") == contents(tmp_path / "command")
    assert fitted.model.config.elastic["fit"] == fitted.record.record()
    lines = {"lines.txt": Path(files[0]).read_text().splitlines()}
    m3bert.fit(source, tmp_path / "function", lines, options, overwrite=True)
    assert contents(tmp_path / "function") == contents(tmp_path / "command")
    with pytest.raises(ValueError, match="holds a model: pass overwrite=True, or name another folder"):
        m3bert.fit(source, tmp_path / "function", lines, options)
    refused("is the source: name another folder", m3bert.fit, source, source, lines, options, overwrite=True)


def test_an_elastic_repository_is_its_source_with_more_beside_it(source, files, tmp_path, capsys):
    out = tmp_path / "elastic"
    fit([source, str(out), "--files", *files[:1], "--depths", "2,3"])
    printed = capsys.readouterr().out
    assert re.search(r"About \d+ min: 60 texts", printed) and re.search(r"^ +2  2,3 ", printed, re.MULTILINE)
    assert not (tmp_path / "elastic.fit").exists()
    for file in Path(source).rglob("*"):
        if file.is_file() and file.name != "config.json":
            assert (out / file.relative_to(source)).read_bytes() == file.read_bytes()
    config = json.loads((out / "config.json").read_text())
    native = json.loads((Path(source) / "config.json").read_text())
    assert {name: config[name] for name in native} == native
    digest = sha256((out / "model.safetensors").read_bytes()).hexdigest()
    assert config["elastic"]["fit"]["source_sha256"] == digest and config["elastic"]["depths"]["2"] == [2, 3]
    texts = ["a list of files", "for the loop"]
    plain, same = (SentenceTransformer(str(folder)).encode(texts) for folder in (source, out))
    assert (plain == same).all()
    fitted = load_model(out)
    small = SentenceTransformer(str(out), trust_remote_code=True, model_kwargs={"output_layer": 2}).encode(texts)
    expected = pooled(fitted, AutoTokenizer.from_pretrained(out), texts, [2], "cls")[2].numpy()
    assert abs(small - expected).max() < 1e-5 * abs(expected).max()
    # Fitting again starts from the source, and keeps its weights.
    fit([str(out), str(tmp_path / "again"), "--files", files[0], "--depths", "1-1", "--no_static"])
    assert Elasticity.of(load_model(tmp_path / "again").config).depths == {1: [1]}
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_a_source_with_remote_code_is_fitted_with_it(files, tmp_path, tiny_tokenizer):
    folder = tmp_path / "own-code"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(OWN_CODE)
    sys.path.insert(0, str(folder))
    try:
        import modeling_own
    finally:
        sys.path.remove(str(folder))
    torch.manual_seed(0)
    config = modeling_own.OwnConfig(
        vocab_size=99, hidden_size=20, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=48, initializer_range=0.5,
    )  # fmt: skip
    config.auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    save(folder, modeling_own.OwnModel(config), tiny_tokenizer)
    fit([str(folder), str(tmp_path / "out"), "--files", files[0], "--depths", "1,3", "--trust_remote_code"])
    inputs = tiny_tokenizer(["a list"], return_tensors="pt")
    with torch.no_grad():
        source = AutoModel.from_pretrained(folder, trust_remote_code=True)(**inputs).last_hidden_state
        whole = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)
        assert torch.equal(whole(**inputs).last_hidden_state, source)
        small = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True, output_layer=2)
        assert len(small.encoder.layer) == 2 and type(small).__name__ == "OwnModel"
        assert torch.equal(small(**inputs).last_hidden_state, whole(**inputs, output_layer=2).last_hidden_state)
        export = ["--format", "native", "--model_name_or_path", str(tmp_path / "out"), "--granularity", "2x20"]
        export_main([*export, "--output_dir", str(tmp_path / "native"), "--trust_remote_code"])
        native = AutoModel.from_pretrained(tmp_path / "native", trust_remote_code=True)
        assert torch.equal(native(**inputs).last_hidden_state, small(**inputs, before_exit=True).last_hidden_state)
    (tmp_path / "staged").mkdir()
    staged = prepare(Checkpoint(tmp_path / "out"), tmp_path / "staged", "user/model", Options(own_code=True))
    assert {"modeling_own.py", "modeling_elastic.py"} < staged.sizes().keys()


OWN_CODE = """
from transformers import BertConfig, BertModel


class OwnConfig(BertConfig):
    model_type = "own_bert"


class OwnModel(BertModel):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return output
"""


@pytest.mark.parametrize(("text", "layers"), [("2", []), ("1,2,12", [1, 2, 12]), ("1-3,10-12", [1, 2, 3, 10, 11, 12])])
def test_a_depth_is_a_number_or_a_list_of_layers(text, layers):
    assert layers_of_depth(text) == layers


@pytest.mark.parametrize("text", ["two", "1-2-3"])
def test_a_depth_that_is_no_list_is_refused(text):
    refused("neither a number of layers nor a list of them", layers_of_depth, text)


def test_files_of_the_same_name_are_all_read(source, files, tmp_path):
    other = tmp_path / "other" / "lines.txt"
    other.parent.mkdir()
    other.write_text("\n".join(random_texts(40, seed=2)))
    fit([source, str(tmp_path / "out"), "--files", files[0], str(other), "--depths", "1-1", "--no_static"])
    record = load_model(tmp_path / "out").config.elastic["fit"]
    assert record["texts"] == 100 and record["sources"] == {"lines.txt": 60, str(other): 40}


def test_columns_that_are_joined_are_fitted_as_one_text(source, tmp_path, monkeypatch):
    rows = [{"title": text, "body": other} for text, other in zip(random_texts(60), random_texts(60, 1), strict=True)]
    for row in rows[:5]:
        row["title"] = None
    (tmp_path / "two.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    separator = AutoTokenizer.from_pretrained(source).sep_token
    texts = [f" {separator} ".join(filter(None, row.values())) for row in rows]
    read: list[str] = []

    def recorded(model, tokenizer, sources, options):
        read.extend(text for texts in sources.values() for text in texts)
        raise KeyboardInterrupt

    monkeypatch.setattr("m3bert.exits.repository.fit_exits", recorded)
    with pytest.raises(KeyboardInterrupt):
        fit([source, str(tmp_path / "a"), "--files", str(tmp_path / "two.jsonl"), "--text_column", "title+body"])
    assert read == texts


def test_a_fit_in_mixed_precision_leaves_the_weights_as_they_were(source, files, tmp_path):
    convert([source, str(tmp_path / "plain")])
    line = [str(tmp_path / "plain"), "--files", files[0], "--device", "cpu", "--depths", "1-1", "1-2"]
    fit([line[0], str(tmp_path / "exact"), *line[1:]])
    options = ["--compute_dtype", "bfloat16", "--attn_implementation", "eager"]
    fit([line[0], str(tmp_path / "mixed"), *line[1:], *options])
    plain, exact, mixed = (AutoModel.from_pretrained(tmp_path / name) for name in ("plain", "exact", "mixed"))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(mixed.state_dict()[name], tensor)
    for layer in mixed.elastic.exits:
        weights = [model.elastic.exits[layer].weight for model in (exact, mixed)]
        assert not torch.equal(*weights)
        assert torch.cosine_similarity(*(weight.flatten() for weight in weights), dim=0) > 0.9


def test_a_checkpoint_in_half_precision_stays_one(source, files, tmp_path):
    convert([source, str(tmp_path / "plain")])
    AutoModel.from_pretrained(tmp_path / "plain").to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    fit([str(tmp_path / "plain"), str(tmp_path / "exits"), "--files", files[0]])
    plain, fitted = (AutoModel.from_pretrained(tmp_path / name) for name in ("plain", "exits"))
    assert fitted.dtype == torch.bfloat16
    for name, tensor in plain.state_dict().items():
        assert torch.equal(fitted.state_dict()[name], tensor)


def test_rows_without_a_text_are_no_texts(source, files, tmp_path):
    convert([source, str(tmp_path / "model"), "--fit_exits", files[1], "--text_column", "body"])
    assert Elasticity.of(AutoModel.from_pretrained(tmp_path / "model").config).fit["sources"] == {"rows.jsonl": 60}


def test_a_teacher_is_named_in_the_record(source, files, tmp_path, encoder_folder, tiny_tokenizer):
    pytest.importorskip("sentence_transformers")
    convert(
        [source, str(tmp_path / "model"), "--fit_exits", files[0], "--teacher", str(encoder_folder)]
        + ["--teacher_cache_dir", str(tmp_path / "cache"), "--basis", "principal"]
    )
    model = AutoModel.from_pretrained(tmp_path / "model").eval()
    spec = Elasticity.of(model.config)
    assert spec.fit["target"] == "tiny-bert" and spec.exits == [0, 1, 2, 3]
    assert pooled(model, AutoTokenizer.from_pretrained(tmp_path / "model"), ["a list"], [3], "cls")[3].isfinite().all()


def write_vectors(source, file, texts, width):
    """Rows of text and vector of an index; the vectors, `(texts, width)`."""
    vectors = index_of(source, width, texts)
    write_rows(file, texts, vectors.tolist())
    return vectors


@pytest.mark.parametrize(("width", "converted"), [(12, False), (20, False), (28, False), (12, True), (28, True)])
def test_a_model_joins_an_index(source, tmp_path, width, converted, capsys):
    """What is loaded from the result embeds into the space of the index."""
    write_modules(Path(source), width=20, max_length=32, pooling="cls")
    texts, rows, out = sorted({*random_texts(150)}), tmp_path / "rows.jsonl", tmp_path / "out"
    index = write_vectors(source, rows, texts, width)
    if converted:
        convert([source, str(tmp_path / "plain")])
        source = str(tmp_path / "plain")
    fit([source, str(out), "--target_vectors", str(rows), "--depths", "1-1", "--no_static"])
    assert f"Fitted to {len(texts)} texts (target: rows.jsonl" in capsys.readouterr().out
    vectors = torch.from_numpy(SentenceTransformer(str(out), trust_remote_code=True).encode(texts))
    map_file = out / "elastic" / "to_target.npy"
    assert map_file.is_file() == ("elastic/to_target.npy" in files_of(out)) == (width > 20)
    if width > 20:
        vectors = vectors @ torch.from_numpy(np.load(map_file))
    assert vectors.shape == index.shape
    assert torch.cosine_similarity(vectors, index).mean() > 0.99


def test_a_fit_after_a_join_of_a_narrower_index_has_all_dims(source, files, tmp_path):
    write_vectors(source, tmp_path / "rows.jsonl", random_texts(60), 12)
    options = ["--depths", "1-2", "--no_static"]
    fit([source, str(tmp_path / "joined"), "--target_vectors", str(tmp_path / "rows.jsonl"), *options])
    assert load_model(tmp_path / "joined").config.output_dim == 12
    fit([str(tmp_path / "joined"), str(tmp_path / "again"), "--files", files[0], *options])
    again = load_model(tmp_path / "again")
    texts = ["a list of files", "for the loop"]
    vectors = pooled(again, AutoTokenizer.from_pretrained(tmp_path / "again"), texts, [3], "cls")[3]
    assert vectors.shape == (2, 20) and getattr(again.config, "output_dim", None) is None


def test_a_join_that_cannot_be_is_refused(source, files, tmp_path):
    line, rows = [source, str(tmp_path / "out")], tmp_path / "rows.jsonl"
    write_vectors(source, rows, random_texts(15), 12)
    target = ["--target_vectors", str(rows)]
    for options, reason in (
        (target, "15 texts are too few to fit exits of 20 dims"),
        ([*target, "--teacher", "large"], "--target_vectors are the vectors of a teacher: pass them or --teacher"),
        ([*target, "--vector_column", "embedding"], r"lacks the column\(s\) embedding; it has text, vector"),
        ([], "A fit needs texts: pass either --files or --target_vectors"),
        ([*target, "--files", files[0]], "A fit needs texts: pass either --files or --target_vectors"),
    ):
        refused(reason, fit, [*line, *options])
    modules = [
        models.Transformer(source, max_seq_length=32),
        models.Pooling(20, "cls"),
        models.Dense(20, 8, bias=False, activation_function=torch.nn.Identity()),
    ]
    SentenceTransformer(modules=modules).save(str(tmp_path / "projected"))
    write_vectors(source, rows, random_texts(60), 12)
    message = r"stays behind its exits, .*: convert the model first \(m3bert convert\)"
    refused(message, fit, [str(tmp_path / "projected"), str(tmp_path / "out"), *target])
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_is_said(source, files, tmp_path):
    line, few = [source, str(tmp_path / "out")], tmp_path / "few.txt"
    few.write_text("the first text\nanother one\n" * 100)
    message = "--fit_exits needs the pooling, which --encoder_only leaves out"
    refused(message, convert, [*line, "--fit_exits", files[0], "--encoder_only"])
    for options, reason in (
        (["--files", files[0], "--compute_dtype", "int8"], "compute_dtype='int8' is unknown; legal values: float32,"),
        (["--files", files[0], "--depths", "1,2", "2-2"], "a path must end in the last layer, 3"),
        (["--files", files[0], "--depths", "1,3", "2-3"], "two of them are depth 2. A depth has one list of layers"),
        (["--files", files[0], "--depths", "3-1"], "--depths 3-1: 3-1 has no layers; write 1-3"),
        (["--files", files[0], "--max_length", "0"], "max_length=0 must be at least 1"),
        (["--files", str(few), "--depths", "1-2"], "These texts are too few, or too often equal"),
    ):
        refused(reason, fit, [*line, *options])
    for command, option in ((convert, "--fit_exits"), (fit, "--files")):
        refused(r"rows.jsonl lacks the column\(s\) text \(text_column", command, [*line, option, files[1]])
    assert not (tmp_path / "out").exists()


def test_settings_that_cannot_be_read_stop_the_fit(source, files, tmp_path):
    """Exits that are fitted to another pooling than the published one are wrong."""
    shutil.copytree(source, tmp_path / "broken")
    write_modules(tmp_path / "broken", width=20, pooling="cls")
    (tmp_path / "broken" / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ValueError, match="has no 1_Pooling/config.json"):
        fit([str(tmp_path / "broken"), str(tmp_path / "out"), "--files", files[0]])


def test_embedding_gemma_keeps_its_two_maps_after_the_pooling(files, tmp_path, tiny_tokenizer, capsys):
    torch.manual_seed(0)
    source, out = tmp_path / "gemma", tmp_path / "out"
    config = CONFIG_MAPPING["gemma3_text"](
        vocab_size=99, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=24, pad_token_id=1, bos_token_id=0, eos_token_id=2, sliding_window=8,
        use_bidirectional_attention=True, initializer_range=0.5, max_position_embeddings=48,
    )  # fmt: skip
    save(source, AutoModel.from_config(config), tiny_tokenizer)
    modules = [
        models.Transformer(str(source), max_seq_length=32), models.Pooling(16, "mean"),
        models.Dense(16, 40, bias=False, activation_function=torch.nn.Identity()),
        models.Dense(40, 16, bias=False, activation_function=torch.nn.Identity()), models.Normalize(),
    ]  # fmt: skip
    SentenceTransformer(modules=modules).save(str(source))
    fit([str(source), str(out), "--files", files[0], "--depths", "1-1", "1,3"])
    assert "    2  1,3  " in capsys.readouterr().out
    texts = ["a list of files", "for the loop", "read it"]
    whole = SentenceTransformer(str(source)).encode(texts)
    assert (SentenceTransformer(str(out)).encode(texts) == whole).all()
    assert (SentenceTransformer(str(out), trust_remote_code=True).encode(texts) == whole).all()
    encoder = GridEncoder.from_pretrained(out, grid="0,1,2,3x16")
    vectors = encoder.encode(texts, role=None)
    for depth in (0, 1, 2):
        small = SentenceTransformer(str(out), trust_remote_code=True, model_kwargs={"output_layer": depth})
        truncated = small.encode(texts)
        assert abs(truncated - vectors.at(Granularity(depth, 16)).numpy()).max() < 1e-5
        assert small.get_embedding_dimension() == 16
        assert (truncated * whole).sum(axis=1).mean() > 0.5  # in the space of the whole model
    with pytest.raises(ValueError, match="output_dim=8 is not available here; legal values: 16"):
        AutoModel.from_pretrained(out, trust_remote_code=True, output_layer=2, output_dim=8)
