"""Late interaction: the paths of a `MultiVectorEncoder`, and the plain folders of its sizes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoTokenizer

from m3bert import FitOptions, fit
from m3bert.commands.export import main as export
from m3bert.encode.encoder import GridEncoder
from m3bert.exits.late import MaxSim
from m3bert.exits.queries import span_of
from m3bert.exits.raw_states import RawStates
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.hub_cards.router_export import export_router
from m3bert.modeling.files_elastic import Source
from m3bert.modeling.modeling_elastic import make_elastic
from m3bert.trainers import Granularity
from tests.conftest import WORDS, assert_close, refused, save
from tests.elastic_repositories import SIZES


library: Any = pytest.importorskip("sentence_transformers")
TEXTS = [" ".join(random.Random(number).choices(WORDS, k=8)) for number in range(80)]
PATH = {3: [1, 2, 6]}
EXPANSION = {"strategy": "fixed", "attend": False, "length": 12}


def save_late(
    folder: Path, tokenizer: Any, *, dense: int | None = 32, expansion: dict[str, Any] | None = None, mask: bool = True
) -> Any:
    """Save a `MultiVectorEncoder` of random weights, and return it; its Dense module reads `dense` dims."""
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Transformer

    bare = folder / "bare"
    save(bare, AutoModel.from_config(CONFIG_MAPPING["bert"](**SIZES)), tokenizer)
    parts: list[Any] = [Transformer(str(bare), query_expansion=expansion)]
    tokens: Any = {"module_input_name": "token_embeddings"}
    if dense is not None:
        parts.append(Dense(dense, 8, bias=False, activation_function=torch.nn.Identity(), **tokens))
    if mask:
        parts.append(MultiVectorMask(skiplist_words=["of", "the"]))
    parts.append(Normalize(**tokens))
    model = library.MultiVectorEncoder(modules=parts, prompts={"query": "read ", "document": ""}, device="cpu")
    model.save_pretrained(str(folder / "source"))
    return model


def vectors(folder: Path, **options: Any) -> list[torch.Tensor]:
    """The token vectors of queries and documents by a folder."""
    model = library.MultiVectorEncoder(str(folder), device="cpu", **options)
    return [*model.encode_query(TEXTS[:5]), *model.encode_document(TEXTS[5:12])]


def assert_equal_vectors(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("expansion", [None, EXPANSION], ids=["plain", "expansion"])
def test_sizes_are_plain_folders(expansion, tmp_path, tiny_tokenizer, capsys):
    """`MultiVectorEncoder` loads every size without our code, with the vectors of the elastic repository."""
    save_late(tmp_path, tiny_tokenizer, expansion=expansion)
    record = fit(tmp_path / "source", tmp_path / "elastic", TEXTS, FitOptions(paths=PATH, depths=[4])).record
    assert [*record.paths] == [3, 4] and record.pooling is None and 0 < record.retrieval[3] < 1
    export(
        ["--format", "native", "--model", str(tmp_path / "elastic"), "--sizes", "all", "--output_dir", f"{tmp_path}/s"]
    )
    assert "MultiVectorEncoder" in capsys.readouterr().out
    for depth in record.paths:
        folder = tmp_path / "s" / f"{depth}-layers"
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == depth
        assert not [*folder.glob("*.py"), *folder.glob("elastic"), *folder.glob("*_Pooling")]
        by_code = {"trust_remote_code": True, "model_kwargs": {"output_layer": depth}}
        assert_equal_vectors(vectors(folder), vectors(tmp_path / "elastic", **by_code))


def as_pylate(source: Path) -> None:
    """Write the files of a folder as PyLate does: no modules behind the Dense one, and prefixes of both sides."""
    modules = json.loads((source / "modules.json").read_text())[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (source / "modules.json").write_text(json.dumps(modules))
    config = {"model_type": "ColBERT", "query_prefix": "name ", "document_prefix": "text ", "query_length": 12}
    (source / "config_sentence_transformers.json").write_text(json.dumps(config))


@pytest.mark.parametrize("rewrite", [None, as_pylate])
def test_the_full_size_is_the_source(rewrite, tmp_path, tiny_tokenizer):
    save_late(tmp_path, tiny_tokenizer)
    if rewrite is not None:
        rewrite(tmp_path / "source")
    fit(tmp_path / "source", tmp_path / "elastic", TEXTS, FitOptions(paths=PATH))
    export_native(Checkpoint(tmp_path / "elastic"), tmp_path / "full")
    expected = vectors(tmp_path / "source")
    assert_equal_vectors(vectors(tmp_path / "full"), expected)
    assert_equal_vectors(vectors(tmp_path / "elastic"), expected)


def test_default_depths_are_paths(tmp_path, tiny_tokenizer):
    """A sixth of the layers is one layer, which would need an exit."""
    save_late(tmp_path, tiny_tokenizer)
    record = fit(tmp_path / "source", tmp_path / "elastic", TEXTS).record
    assert [*record.paths] == [2, 3, 4] and not record.layers
    assert all(name.split(",")[-1] == "6" for compared in record.candidates.values() for name in compared)


@torch.no_grad()
def test_scores_are_those_of_the_definition(tmp_path, tiny_tokenizer):
    """The sum over a query's tokens of the largest cosine to a token of the document that the mask keeps."""
    save_late(tmp_path, tiny_tokenizer)
    source = tmp_path / "source"
    encoder = make_elastic(AutoModel.from_pretrained(source).eval())
    encoder.loaded_from = Source.at(source, {}).with_settings()
    tokenizer = AutoTokenizer.from_pretrained(source)
    measure = MaxSim.of(RawStates(encoder, tokenizer, "mean", 4), TEXTS[:8])
    dense = next(module for module in measure.model if type(module).__name__ == "Dense").linear.weight
    dropped = torch.tensor(tokenizer.convert_tokens_to_ids(["of", "the"]))

    def tokens(text: str) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = tokenizer(text, return_tensors="pt")
        states = encoder(**inputs).last_hidden_state[0] @ dense.T
        return torch.nn.functional.normalize(states, dim=1), ~torch.isin(inputs["input_ids"][0], dropped)

    for row, text in enumerate((TEXTS[0], TEXTS[4])):
        query, _ = tokens("read " + span_of(text))
        for column, document in enumerate(TEXTS[:8]):
            states, counted = tokens(document)
            expected = (query @ states[counted].T).max(dim=1).values.sum()
            assert_close(measure.full[row, column], expected)


LATE = "source is for late interaction"
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no Dense": ({"dense": None}, {}, "source has the modules Transformer, MultiVectorMask, Normalize"),
    "narrow Dense": ({"dense": 16}, {}, "reads 16 dims, and its encoder gives 32"),
    "prefix": ({}, {"layers": [2]}, r"depths=\[2\].*paths alone.*2\.\.5"),
    "one layer": ({}, {"depths": [1]}, r"depths=\[1\].*paths alone.*2\.\.5"),
    "table": ({}, {"depths": [0, 3]}, r"depths=\[0\].*paths alone.*2\.\.5"),
    "pooling": ({}, {"depths": [3], "pooling": "cls"}, "pooling is for embeddings of texts"),
    "basis": ({}, {"depths": [3], "basis": "principal"}, "basis is for embeddings of texts"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path, tiny_tokenizer):
    saved, options, message = REFUSED[case]
    save_late(tmp_path, tiny_tokenizer, **saved)
    refused(message, fit, tmp_path / "source", tmp_path / "elastic", TEXTS, FitOptions(**options))
    assert not [path for path in tmp_path.glob("elastic*") if path.is_dir() and any(path.iterdir())]


def test_other_readers_refuse_it(tmp_path, tiny_tokenizer):
    """What compares one vector per text does not take the tokens for a mean."""
    save_late(tmp_path, tiny_tokenizer)
    refused(LATE, GridEncoder.from_pretrained, str(tmp_path / "source"))
    fit(tmp_path / "source", tmp_path / "elastic", TEXTS, FitOptions(paths=PATH))
    checkpoint = Checkpoint(tmp_path / "elastic")
    refused("a Router does not have", export_router, checkpoint, tmp_path / "router", Granularity(3, 32))
    refused("its modules read all 32 dims", export_native, checkpoint, tmp_path / "narrow", Granularity(3, 16))
