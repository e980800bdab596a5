"""A native export gives the embeddings of its granularity without remote code, and its files are what servers read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import environment
from transformers import AutoModel, AutoTokenizer

from m3bert.evaluation import GridEncoder, GridResults
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native, lost_layers
from m3bert.hub_cards.publication import Options, prepare
from m3bert.hub_cards.router_export import export_router
from m3bert.hub_cards.static_export import export_static
from m3bert.modeling import M3BertForMaskedLM, M3BertForTokenClassification, M3BertModel
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Granularity, Grid, Projection
from tests.conftest import assert_close, refused, save, tiny_config, write_modules
from tests.models.test_native import BIASES, POST_NORM
from tests.published import GRID, assert_served, contrastive_trainer, evaluated, save_with_exits
from tests.static_checkpoints import LONGEST, PROMPTS, break_row, save_static, state_only_model


NATIVE = {**POST_NORM, **BIASES}
FULL = Granularity(6, 32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_tokenizer, sentences) -> Path:
    """A post-norm m3BERT after training, with its results."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = contrastive_trainer(folder / "model", tiny_tokenizer, sentences, M3BertModel(tiny_config(**NATIVE)))
    trainer.train()
    trainer.save_model()
    (folder / "model" / "LICENSE").write_text("free")
    evaluated(folder / "model", folder / "data", sentences).save(folder / "results.json")
    return folder


@pytest.fixture(scope="module")
def with_exits(tmp_path_factory, tiny_tokenizer, sentences) -> Path:
    """A post-norm m3BERT with exits at depths 1, 2, 4 and 6, in the principal basis."""
    folder = tmp_path_factory.mktemp("exits")
    save_with_exits(folder, tiny_tokenizer, sentences, static=False, **NATIVE)
    return folder


@pytest.fixture(scope="module")
def projected(trained, tmp_path_factory) -> Path:
    """The trained m3BERT with a projection of its last layer to 12 dims."""
    folder = tmp_path_factory.mktemp("projected") / "model"
    shutil.copytree(trained / "model", folder)
    write_modules(folder, width=32, max_length=40, pooling="cls", projection=Projection(32, 12))
    (folder / "training.json").unlink()
    return folder


def exported(source: Path, folder: Path, size: str | None) -> Checkpoint:
    return export_native(Checkpoint(source), folder, Grid.parse(size).full if size else None)


def embeddings(checkpoint: Checkpoint, texts: list[str], granularity: Granularity) -> torch.Tensor:
    return checkpoint.encoder(Grid((granularity,))).encode(texts).at(granularity)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("trained", None), ("trained", "2x32"), ("trained", "4x16"),
        ("with_exits", None), ("with_exits", "4x16"), ("with_exits", "2x32"),
        ("projected", None), ("projected", "6x8"),
    ],
)  # fmt: skip
def test_embeddings_are_those_of_the_granularity(kind, size, request, tmp_path, sentences):
    """Read by this project and by sentence-transformers, without remote code."""
    source = request.getfixturevalue(kind)
    source = source / "model" if kind == "trained" else source
    native, texts = exported(source, tmp_path, size), sentences[:9]
    granularity = Grid.parse(size).full if size else Checkpoint(source).full
    expected = embeddings(Checkpoint(source), texts, granularity)
    assert native.full == granularity and native.config.model_type == "bert"
    assert_close(embeddings(native, texts, granularity), expected)
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(tmp_path), device="cpu")
    vectors = model.encode(texts, convert_to_tensor=True)
    assert_close(vectors, expected)
    assert model.max_seq_length == Checkpoint(source).max_length
    assert_served(tmp_path)
    assert not list(tmp_path.glob("*.py")) and "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_a_full_size_without_exits_serves_every_granularity(trained, tmp_path, sentences):
    native, source = exported(trained / "model", tmp_path, None), Checkpoint(trained / "model")
    assert EmbeddingSettings.read(str(tmp_path)).projection is None
    assert native.trained_grid == Grid.parse(GRID)
    assert native.config.matryoshka_dimensions == [8, 16, 32]
    for granularity in Grid.parse(GRID):
        expected = embeddings(source, sentences[:5], granularity)
        assert torch.equal(embeddings(native, sentences[:5], granularity), expected)
    shallow = AutoModel.from_pretrained(tmp_path, num_hidden_layers=2)
    assert len(shallow.encoder.layer) == 2
    assert (tmp_path / "LICENSE").read_text() == "free"


def test_the_files_say_what_was_exported(trained, with_exits, tmp_path):
    native, source = exported(trained / "model", tmp_path / "trained", "4x16"), Checkpoint(trained / "model")
    assert native.exported_from == {
        "granularity": "4x16", "full_size": "6x32", "weights": source.weights_fingerprint, "converted_from": None,
    }  # fmt: skip
    assert native.record.grid == "4x8,16" and native.record.objective == source.record.objective
    assert native.grid == Grid.parse("4x8,16")
    dense = load_file(tmp_path / "trained" / "2_Dense" / "model.safetensors")
    assert torch.equal(dense["linear.weight"], torch.eye(16, 32))
    cut = exported(with_exits, tmp_path / "exits", "2x16")
    assert cut.projection.bias is not None and cut.grid == Grid.parse("2x16")


def test_which_layers_an_export_lacks(trained, with_exits, projected):
    plain, exits = Checkpoint(trained / "model"), Checkpoint(with_exits)
    assert lost_layers(plain, FULL) == set()
    assert lost_layers(plain, Granularity(4, 16)) == {0, 1, 2, 3}
    assert lost_layers(exits, FULL) == {0, 1, 2, 3, 4, 5}  # the last layer is rotated
    assert lost_layers(Checkpoint(projected), Granularity(6, 12)) == {0, 1, 2, 3, 4, 5}


def test_a_head_is_kept_or_left_out(tmp_path, tiny_tokenizer):
    for model_class in (M3BertForTokenClassification, M3BertForMaskedLM):
        save(tmp_path / model_class.__name__, model_class(tiny_config(**NATIVE)), tiny_tokenizer)
    tokens = exported(tmp_path / "M3BertForTokenClassification", tmp_path / "tokens", "2x8")
    assert tokens.head == "AutoModelForTokenClassification" and not (tmp_path / "tokens" / "modules.json").exists()
    masked = Checkpoint(tmp_path / "M3BertForMaskedLM")
    with pytest.raises(ValueError, match="M3BertForMaskedLM has no native equivalent: .* or export its encoder"):
        export_native(masked, tmp_path / "masked")
    encoder = export_native(masked, tmp_path / "masked", encoder_only=True)
    assert encoder.head == "AutoModel"
    assert_served(encoder.folder)


def test_what_cannot_be_exported_says_why(run, projected, tmp_path, minilm):
    with pytest.raises(ValueError, match="M3BertModel has no native equivalent: it is pre-norm, .* ONNX instead"):
        exported(run / "output", tmp_path, None)
    refused("is not elastic: it is a native bert already", exported, Path(minilm), tmp_path, None)
    refused("The model projects layer 6 to 12 dims; outside of it: 4x12", exported, projected, tmp_path, "4x12")
    for options in ({"format": "native", "quantize": True}, {"format": "router", "onnx": (Granularity(2, 8),)}):
        refused("quantize and onnx do not apply to format=", Options, **options)


def test_it_is_published_with_its_own_card_and_the_scores_that_hold(trained, tmp_path):
    results, source = GridResults.load(trained / "results.json"), Checkpoint(trained / "model")
    for name, size, grid in (("cut", "4x16", "4x8,16"), ("whole", None, GRID)):
        (tmp_path / name).mkdir()
        options = Options(Grid.parse(size).full if size else None, format="native")
        folder = prepare(source, tmp_path / name, "user/model-bert", options, results).folder
        assert GridResults.load(folder / "results.json").grid == grid
        card = " ".join((folder / "README.md").read_text().split())
        assert "This is a native export: a plain `BertModel`" in card
        assert f"granularity `{size or '6x32'}` of an elastic checkpoint of size `6x32`" in card
        assert source.weights_fingerprint in card and "trust_remote_code" not in card
        assert "- text-embeddings-inference" in card


def test_an_exit_that_reads_the_static_table_is_published_with_its_map_of_the_state(
    trained, tmp_path, tiny_tokenizer, caplog
):
    """The scores of the m3BERT do not hold for it, and both cards say so."""
    save_static(tmp_path / "model", tiny_tokenizer)
    source, cards = Checkpoint(tmp_path / "model"), {}
    results = GridResults.load(trained / "results.json")
    for format in ("elastic", "native"):
        (tmp_path / format).mkdir()
        native = format == "native"
        options = Options(Granularity(4, 16) if native else None, format=format)
        folder = prepare(source, tmp_path / format, "user/model", options, results if native else None).folder
        cards[format] = " ".join((folder / "README.md").read_text().split())
        assert not (folder / "results.json").exists()
    assert "The scores of depth 4 are left out" in caplog.text
    assert "Its exit reads the hidden state alone." in cards["native"]
    assert "The exits of depths 2 and 4 read the static table beside the hidden state." in cards["elastic"]
    assert "Depth 0 is a static table" in cards["elastic"]
    plain, grid = state_only_model(source.folder), Grid.parse("4x16")
    expected = GridEncoder(plain, tiny_tokenizer, grid, max_length=LONGEST, prompts=PROMPTS)
    vectors = embeddings(Checkpoint(tmp_path / "native"), ["read the list", ""], Granularity(4, 16))
    torch.testing.assert_close(vectors, expected.encode(["read the list", ""]).at(Granularity(4, 16)))


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
    refused(error, export_static, Checkpoint(static), tmp_path / "static")
    assert not (tmp_path / "static").exists()


@pytest.mark.parametrize("layer", [1, 6])
def test_a_router_needs_an_exit_for_its_queries(static, tmp_path, layer):
    with pytest.raises(ValueError, match=f"Depth {layer} does not embed queries into .*; depths that do: 0, 2, 4"):
        export_router(Checkpoint(static), tmp_path / "router", Granularity(layer, 32))


def test_a_cut_to_the_table_is_exported_as_well(static, tmp_path, tiny_tokenizer):
    cut = tmp_path / "cut"
    save(cut, M3BertModel.from_pretrained(static, output_layer=0, output_dim=16), tiny_tokenizer)
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
