"""An elastic repository of any encoder is exported as this encoder with fewer layers, with the same embeddings."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.hub_cards.router_export import export_router
from m3bert.hub_cards.static_export import export_static
from m3bert.modeling.parts_elastic import view
from m3bert.models.auto import load_model
from m3bert.trainers import Granularity, Projection
from tests.conftest import assert_close, refused
from tests.elastic_repositories import KINDS, PATH, VOCABULARY, WIDTH, save_elastic


TEXTS = ["read the list", "a name", "open the file and read of it by name"]


def vectors(folder: Path, texts: list[str] = TEXTS, **options: object) -> torch.Tensor:
    """Embeddings of sentence-transformers."""
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(folder), device="cpu", **options)
    return model.encode(texts, prompt_name="query", convert_to_tensor=True)


def with_code(folder: Path, layer: int, dim: int = WIDTH) -> torch.Tensor:
    """Embeddings of sentence-transformers at a size, by remote code."""
    sizes = {"output_layer": layer, **({"output_dim": dim} if dim < WIDTH else {})}
    return vectors(folder, trust_remote_code=True, model_kwargs=sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_the_depth(kind, tmp_path, tiny_tokenizer):
    """The source's own class with fewer layers: not one bit differs before the exit."""
    model = save_elastic(tmp_path / "model", tiny_tokenizer, kind).eval()
    ids = torch.randint(5, VOCABULARY, (2, 12))
    for size, layers in (("2x32", [1, 2]), ("4x16", PATH), ("6x32", [*range(1, 7)])):
        granularity = Granularity.parse(size)
        native = export_native(Checkpoint(tmp_path / "model"), tmp_path / size, granularity)
        assert json.loads((tmp_path / size / "config.json").read_text()).keys().isdisjoint(("elastic", "auto_map"))
        assert not list((tmp_path / size).glob("*.py")) and not (tmp_path / size / "elastic").exists()
        config = AutoConfig.from_pretrained(tmp_path / size)
        assert (config.model_type, config.num_hidden_layers) == (kind, len(layers)) and native.full == granularity
        loaded = AutoModel.from_pretrained(tmp_path / size)
        assert type(loaded) is MODEL_MAPPING[type(config)]
        with torch.no_grad():
            expected = view(model, layers, model.layers_at(len(layers))) if len(layers) < 6 else model
            caching = {"use_cache": False} if hasattr(config, "use_cache") else {}  # a view has no cache
            expected = type(loaded).forward(expected, input_ids=ids, **caching).last_hidden_state
            assert torch.equal(loaded(input_ids=ids).last_hidden_state, expected)


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False)])
def test_embeddings_are_those_of_the_granularity(pooling, normalize, tmp_path, tiny_tokenizer):
    save_elastic(tmp_path / "model", tiny_tokenizer, pooling=pooling, normalize=normalize, table=False)
    checkpoint = Checkpoint(tmp_path / "model")
    for granularity in (Granularity(2, 32), Granularity(4, 16), Granularity(6, 32)):
        folder = tmp_path / str(granularity)
        export_native(checkpoint, folder, granularity)
        expected = with_code(tmp_path / "model", granularity.layer, granularity.dim)
        assert_close(vectors(folder), expected)


BARE = """
    import sys, torch, transformers
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer
    model, texts = transformers.{name}.from_pretrained("native").eval(), {texts}
    inputs = AutoTokenizer.from_pretrained("native")(texts, return_tensors="pt", padding=True)
    vectors = SentenceTransformer("native", device="cpu").encode(texts, prompt_name="query", convert_to_tensor=True)
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    torch.save((vectors, states, inputs["attention_mask"]), "found.pt")
    print(type(model).__module__, any("modeling_elastic" in name for name in sys.modules))
"""


@pytest.mark.parametrize(
    ("kind", "name", "pooling"),
    [
        ("bert", "BertModel", "mean"), ("modernbert", "ModernBertModel", "cls"),
        ("llama", "LlamaModel", "mean"), ("qwen3", "Qwen3Model", "lasttoken"),
    ],
)  # fmt: skip
def test_a_path_is_a_plain_model_where_this_project_is_not_installed(
    kind, name, pooling, tmp_path, tiny_tokenizer, run_bare
):
    """Post-norm, pre-norm and causal: the native class alone, and sentence-transformers without remote code."""
    pytest.importorskip("sentence_transformers")
    save_elastic(tmp_path / "model", tiny_tokenizer, kind, table=False, pooling=pooling, normalize=True)
    export_native(Checkpoint(tmp_path / "model"), tmp_path / "native", Granularity(4, 16))
    said = run_bare(BARE.format(name=name, texts=TEXTS)).split()
    assert said == [f"transformers.models.{kind}.modeling_{kind}", "False"]
    embedded, states, mask = torch.load(tmp_path / "found.pt")
    assert_close(embedded, with_code(tmp_path / "model", 4, 16))
    model = load_model(tmp_path / "model", output_layer=4).eval()
    inputs = tiny_tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = model(**inputs, before_exit=True).last_hidden_state
    assert_close(states[mask.bool()], expected[mask.bool()])


def test_a_depth_that_reads_the_table_is_exported_with_its_state_only_map(tmp_path, tiny_tokenizer):
    save_elastic(tmp_path / "model", tiny_tokenizer, normalize=True)
    native = export_native(Checkpoint(tmp_path / "model"), tmp_path / "native", Granularity(4, 32))
    model = load_model(tmp_path / "model")
    fitted = model.elastic.exits["4"]
    assert native.exported_from["state_only"] and native.exported_from["converted_from"] == "maker/encoder"
    assert torch.equal(native.projection.weight, fitted.weight) and torch.equal(native.projection.bias, fitted.bias)


def test_a_published_projection_follows_the_exit(tmp_path, tiny_tokenizer):
    save_elastic(tmp_path / "model", tiny_tokenizer, projection=Projection(WIDTH, 12), table=False)
    for dim in (12, 8):
        export_native(Checkpoint(tmp_path / "model"), tmp_path / str(dim), Granularity(4, dim))
        expected = with_code(tmp_path / "model", 4)[:, :dim]
        assert_close(vectors(tmp_path / str(dim)), expected)


def test_the_settings_of_the_source_are_kept(tmp_path, tiny_tokenizer):
    save_elastic(tmp_path / "model", tiny_tokenizer)
    file = tmp_path / "model" / "sentence_bert_config.json"
    file.write_text(json.dumps({"max_seq_length": 16, "do_lower_case": True}))
    (tmp_path / "model" / "LICENSE").write_text("free")
    export_native(Checkpoint(tmp_path / "model"), tmp_path / "native", Granularity(2, 8))
    assert json.loads((tmp_path / "native" / file.name).read_text()) == json.loads(file.read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "config_sentence_transformers.json", "LICENSE"):
        assert (tmp_path / "native" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_layers_that_read_their_number_and_the_table_are_no_native_encoder(tmp_path, tiny_tokenizer):
    """The first layer of ModernBERT has no norm before its attention, and only the first."""
    save_elastic(tmp_path / "model", tiny_tokenizer, "modernbert", path=[2, 3, 5, 6])
    checkpoint, folder = Checkpoint(tmp_path / "model"), tmp_path / "native"
    message = "These layers of ModernBertModel give other vectors when they are loaded"
    refused(message, export_native, checkpoint, folder, Granularity(4, 32))
    refused("Depth 0 is a static table, not an encoder", export_native, checkpoint, folder, Granularity(0, 32))


def test_a_static_table_is_exported_through_the_projection(tmp_path, tiny_tokenizer):
    projection = Projection(WIDTH, 12)
    save_elastic(tmp_path / "model", tiny_tokenizer, projection=projection)
    assert export_static(Checkpoint(tmp_path / "model"), tmp_path / "static") == Granularity(0, 12)
    expected = with_code(tmp_path / "model", 0)
    close = torch.cosine_similarity(vectors(tmp_path / "static"), expected)
    torch.testing.assert_close(close, torch.ones(3), atol=1e-5, rtol=0)


def test_a_router_embeds_queries_by_a_path_and_documents_by_all_layers(tmp_path, tiny_tokenizer):
    library = pytest.importorskip("sentence_transformers")
    save_elastic(tmp_path / "model", tiny_tokenizer, table=False, normalize=True)
    export_router(Checkpoint(tmp_path / "model"), tmp_path / "router", Granularity(4, 32))
    router = library.SentenceTransformer(str(tmp_path / "router"), device="cpu")
    assert_close(router.encode_query(TEXTS, convert_to_tensor=True), with_code(tmp_path / "model", 4))
    full = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert_close(
        router.encode_document(TEXTS, convert_to_tensor=True), full.encode_document(TEXTS, convert_to_tensor=True)
    )
