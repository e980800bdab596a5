"""An embedding model embeds alike wherever it is read, trained, converted or exported."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers.normalizers import BertNormalizer
from transformers import AutoModel, AutoTokenizer

from m3bert import trainers
from m3bert.commands.convert import convert
from m3bert.commands.encoder import EncoderArguments, load_encoder
from m3bert.evaluation import GridEncoder, as_sentence_transformer, score_grid
from m3bert.evaluation.evaluate import TaskEmbeddings
from m3bert.evaluation.evaluators import STS, Retrieval
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.hub_cards.onnx_export import embed, export_onnx, open_session
from m3bert.index.plan import encoder_identity
from m3bert.models.conversion import convert_to_m3bert
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Granularity, Grid, Projection, Teacher, fit_exits
from tests.conftest import assert_close, quiet, refused, save, write_modules


sentence_transformers = pytest.importorskip("sentence_transformers")

KINDS: dict[str, dict[str, Any]] = {
    "mean": {}, "cls": {"pooling": "cls"}, "lasttoken": {"pooling": "lasttoken"}, "projected": {"projection": 8},
    "normalised": {"pooling": "cls", "normalize": True},
    "default": {"prompts": {"sts": "open the "}, "default_prompt_name": "sts", "do_lower_case": True},
    "prompted": {"prompts": {"query": "open the ", "document": "read a "}, "normalize": True, "projection": 8},
}  # fmt: skip
LENGTH = 9  # less than the model and its tokenizer read
FULL = {name: Granularity(2, kind.get("projection", 20)) for name, kind in KINDS.items()}


@pytest.fixture
def sentences(sentences) -> list[str]:
    """With capitals, which some tokenizers tell from small letters."""
    return [text.title() for text in sentences]


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folders(encoder_folder, tmp_path_factory) -> dict[str, Path]:
    """A tiny BERT as an embedding model of each kind."""
    found = {}
    for name, settings in KINDS.items():
        found[name] = folder = tmp_path_factory.mktemp("published") / name
        AutoModel.from_pretrained(encoder_folder).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(encoder_folder)
        if settings.get("do_lower_case"):
            tokenizer.backend_tokenizer.normalizer = BertNormalizer(lowercase=False)
        tokenizer.save_pretrained(folder)
        dim = settings.get("projection")
        projection = {"projection": Projection(20, dim)} if dim else {}
        write_modules(folder, width=20, max_length=LENGTH, **{**settings, **projection})
    return found


def embeddings(folder: str | Path, texts: list[str], role: str = "query") -> np.ndarray:
    """The reference: what sentence-transformers gives."""
    model = sentence_transformers.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    return (model.encode_query if role == "query" else model.encode_document)(texts)


@pytest.mark.parametrize("role", ["query", "document"])
def test_every_reader_embeds_alike(folders, kind, sentences, tmp_path, role):
    """sentence-transformers, the encoder of a grid, commands, and a teacher's cache; scale included."""
    folder, texts = folders[kind], sentences[:6]
    expected = embeddings(folder, texts, role)
    encoder = GridEncoder.from_pretrained(folder)
    assert encoder.grid.full == FULL[kind]
    assert_close(encoder.encode(texts, role=role).at(FULL[kind]), expected)
    assert_close(encoder.encode(texts, role=role, folder=tmp_path / "arrays").at(FULL[kind]), expected)
    command = load_encoder(EncoderArguments(model_name_or_path=str(folder), device="cpu"))
    assert_close(command.encode(texts, role=role).at(FULL[kind]), expected)
    settings = EmbeddingSettings.read(folder)
    if settings.default_prompt_name is not None:  # a teacher without a prompt reads by default
        expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(texts)
    prompt = settings.prompts.get(role, "")
    assert_close(Teacher(str(folder), prompt=prompt).embed(texts, tmp_path / "teachers").of(texts), expected)


def test_prompts_stand_before_texts_as_in_sentence_transformers(folders, kind, sentences):
    """Of queries, documents, and other texts: encoded, in the evaluators of both, and in a converted model. Without a
    default prompt, ours reads other texts as queries."""
    library = sentence_transformers.SentenceTransformer(str(folders[kind]), device="cpu")
    encoder = GridEncoder.from_pretrained(folders[kind], grid=Grid((FULL[kind],)))
    texts, model = sentences[:6], as_sentence_transformer(encoder)
    for method, role in (("encode", None), ("encode_query", "query"), ("encode_document", "document")):
        expected = getattr(library, method)(texts)
        assert_close(encoder.encode(texts, role=role).at(FULL[kind]), expected)
        assert_close(getattr(model, method)(texts), expected)
    single = library.encode(texts) if library.default_prompt_name else library.encode_query(texts)
    pairs = TaskEmbeddings(encoder, STS({"sentence1": texts, "sentence2": texts}, range(6)))
    assert_close(pairs.of("sentence1", 2), single)
    search = TaskEmbeddings(encoder, Retrieval({"queries": texts, "documents": texts}, [{0: 1.0}] * 6))
    assert_close(search.of("queries", 2), library.encode_query(texts))


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_similarity_that_ranks_otherwise_is_refused(folders, tmp_path, sentences, similarity, normalize):
    """By evaluations, indexes and plans, unless it is overruled; sentence-transformers' evaluators are given it."""
    shutil.copytree(folders["mean"], tmp_path / "model")
    write_modules(tmp_path / "model", width=20, max_length=LENGTH, similarity=similarity, normalize=normalize)
    encoder = GridEncoder.from_pretrained(tmp_path / "model", grid="2x20")
    assert as_sentence_transformer(encoder).similarity_fn_name == similarity
    task = STS({"sentence1": sentences[:6], "sentence2": sentences[6:12]}, range(6))
    allowed = similarity == "cosine" or (normalize and similarity != "manhattan")
    for reads in (lambda its: score_grid(its, task), encoder_identity):
        reads(replace(encoder, similarity="cosine"))
        if allowed:
            reads(encoder)
        else:
            refused(f"by similarity='{similarity}', and this .*set similarity='cosine'", reads, encoder)


def test_settings_of_the_encoder_that_cannot_be_kept_are_refused(folders, tmp_path):
    shutil.copytree(folders["mean"], tmp_path / "model")
    file = tmp_path / "model" / "sentence_bert_config.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"tokenizer_args": {}, "model_args": {"attn_implementation": "sdpa"}}))
    assert EmbeddingSettings.read(tmp_path / "model").max_length == LENGTH
    file.write_text(json.dumps(kept | {"tokenizer_args": {"add_special_tokens": False}}))
    with pytest.raises(ValueError, match=r"has tokenizer_args=\{.*\} for its encoder, which is not supported"):
        convert(str(tmp_path / "model"), str(tmp_path / "converted"))


def test_smaller_sizes_are_cut_first(folders, kind, sentences):
    encoder = GridEncoder.from_pretrained(folders[kind], grid=f"2x5,{FULL[kind]}")
    found, whole = (encoder.encode(sentences[:6]).at(Granularity(2, dim)) for dim in (5, FULL[kind].dim))
    cut = whole[:, :5]
    assert_close(found, torch.nn.functional.normalize(cut) if encoder.normalize else cut)


def test_a_given_value_wins(folders):
    encoder = GridEncoder.from_pretrained(folders["prompted"], pooling="cls", max_length=5, prompts={"query": ""})
    assert (encoder.pooling, encoder.max_length, encoder.prompts) == ("cls", 5, {"document": "read a "})


@pytest.mark.parametrize("way", ["command", "folder", "model", "sentence-transformers"])
def test_a_converted_model_embeds_like_its_source(folders, kind, sentences, tmp_path, way):
    """Converted by the command or in Python; both write the same modules."""
    folder, target = str(folders[kind]), tmp_path / "converted"
    if way == "command":
        convert(folder, str(target))
    else:
        library = sentence_transformers.SentenceTransformer
        source = {"folder": str, "model": AutoModel.from_pretrained, "sentence-transformers": library}[way](folder)
        convert_to_m3bert(source).save_pretrained(target)
        AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    assert_close(embeddings(target, sentences[:6]), embeddings(folder, sentences[:6]))
    for file in ("modules.json", "sentence_bert_config.json"):
        assert json.loads((target / file).read_text()) == json.loads((folders[kind] / file).read_text())


def test_exports_embed_like_their_source(folders, kind, sentences, tmp_path):
    """At the full size as sentence-transformers, at smaller sizes as the encoder of a grid."""
    convert(str(folders[kind]), str(tmp_path / "elastic"))
    expected, small = embeddings(folders[kind], sentences[:6]), Granularity(2, 5)
    encoder = GridEncoder.from_pretrained(tmp_path / "elastic", grid=Grid((small, FULL[kind])))
    cut = encoder.encode(sentences[:6]).at(small)
    for size, wanted in ((FULL[kind], expected), (small, cut)):
        export_native(Checkpoint(tmp_path / "elastic"), tmp_path / str(size), size)
        assert_close(embeddings(tmp_path / str(size), sentences[:6]), wanted)


def test_fitting_exits_keeps_the_full_size(folders, kind, sentences, tmp_path):
    """Pooling, prompts, projection and length come from the model, and are saved with it."""
    model, tokenizer = convert_to_m3bert(folders[kind]), AutoTokenizer.from_pretrained(folders[kind])
    fit = fit_exits(model, tokenizer, sentences, static=False)
    assert (fit.pooling, fit.max_length) == (KINDS[kind].get("pooling", "mean"), LENGTH)
    assert fit.prompts == list(KINDS[kind].get("prompts", {"": ""}).values())
    save(tmp_path, model, tokenizer)
    found, dim = embeddings(tmp_path, sentences[:6]), FULL[kind].dim
    assert_close(found[:, :dim], embeddings(folders[kind], sentences[:6]))
    assert not found[:, dim:].any()


@pytest.mark.slow
def test_onnx_embeds_like_its_source(folders, kind, sentences, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    encoder = GridEncoder.from_pretrained(folders[kind])
    session = open_session(export_onnx(encoder, FULL[kind], tmp_path / "model.onnx"))
    prompted = [encoder.prompts.get("query", "") + text for text in sentences[:6]]
    assert_close(embed(session, encoder, prompted), embeddings(folders[kind], sentences[:6]), share=1e-4)


EMBEDDING_METHODS = [
    name
    for name, (config, _) in trainers.METHODS.items()
    if issubclass(getattr(trainers, config), trainers.EmbeddingConfig)
]
# Grids for methods that have no default for every encoder.
GRIDS = {"contrastive": "1,2x5,20", "espresso": "1,2x5,20", "2dmse": "1,2x5,20", "starbucks": "1x5,2x20"}
GRIDS |= {"scored-pairs": "1,2x5,20", "simcse": "2x20", "mic": "2x5,20", "mipic": "1,2x5,20"}
# The others need token states or several layers.
PROJECTED = ("contrastive", "scored-pairs", "simcse", "mixture", "ibkd", "ibkd-finetuning")


def trainer_of(name: str, folder: Path, sentences: list[str], output: Path, **changes: Any) -> Any:
    """A trainer of a method with its defaults, at learning rate 0."""
    config_class, trainer_class = (getattr(trainers, each) for each in trainers.METHODS[name])
    options = {"teacher_name_or_path": str(folder), **changes} if name == "ibkd" else changes
    if issubclass(config_class, trainers.DistillationConfig):
        options["teacher_cache_dir"] = str(output.parent / "teachers")
    config = config_class(
        **quiet(output, max_steps=1, per_device_train_batch_size=4, learning_rate=0.0, weight_decay=0.0, **options)
    )
    pairs = {"anchor": sentences[:8], "positive": sentences[8:16]}
    if config.views > 1 or isinstance(config, trainers.DistillationConfig):
        pairs = {"text": sentences[:8]}
    if name == "scored-pairs":
        pairs["score"] = [0.5, 1.0] * 4
    model = convert_to_m3bert(folder) if name == "exit-distillation" else AutoModel.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return trainer_class(model, config, tokenizer, Dataset.from_dict(pairs))


@pytest.mark.parametrize("method", EMBEDDING_METHODS)
def test_training_at_learning_rate_zero_changes_no_embedding(folders, kind, sentences, tmp_path, method):
    """With the defaults of each method; those that cannot train a projection refuse it."""
    projected = "projection" in KINDS[kind]
    changes = {"grid": GRIDS[method]} if method in GRIDS and not projected else {}
    if projected and method not in PROJECTED:
        refused("grid|projection", trainer_of, method, folders[kind], sentences, tmp_path / "trained", **changes)
        return
    trainer = trainer_of(method, folders[kind], sentences, tmp_path / "trained", **changes)
    trainer.train()
    trainer.save_model()
    for role in ("query", "document"):
        found, expected = (embeddings(at, sentences[:6], role) for at in (tmp_path / "trained", folders[kind]))
        assert_close(found, expected)
    saved, published = (EmbeddingSettings.read(at) for at in (tmp_path / "trained", folders[kind]))
    assert (saved.max_length, saved.prompts) == (LENGTH, published.prompts)


def test_arguments_that_differ_from_the_folder_win_and_are_said(folders, sentences, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        changes = {"pooling": "cls", "projection_dim": 6, "query_prompt": "the ", "max_length": 30}
        trainer = trainer_of("contrastive", folders["prompted"], sentences, tmp_path / "trained", **changes)
    said = [record.message for record in caplog.records if "was published with" in record.message]
    assert [message.split()[5].partition("=")[0] for message in said] == [
        "pooling", "projection_dim", "query_prompt", "max_length"
    ]  # fmt: skip
    trainer.save_model()
    saved = EmbeddingSettings.read(tmp_path / "trained")
    assert (saved.pooling, saved.projection.out_features, saved.max_length, saved.normalize) == ("cls", 6, 30, True)
    assert saved.prompts == {"query": "the ", "document": "read a "}


def test_training_goes_on_from_a_published_projection(folders, sentences, tmp_path):
    """HPD, then stage 2 of IBKD, with and without its number of dims."""
    first = trainer_of(
        "ibkd", folders["cls"], sentences, tmp_path / "first", method="hpd", projection_dim=8,
        teacher_name_or_path=str(folders["mean"]),
    )  # fmt: skip
    first.train()
    first.save_model()
    before = EmbeddingSettings.read(tmp_path / "first").projection.weight
    for changes in ({}, {"projection_dim": 8}):
        second = trainer_of("ibkd-finetuning", tmp_path / "first", sentences, tmp_path / "second", **changes)
        assert str(second.nested.objective.grid) == "2x8"
        assert torch.equal(second.projection.weight, before)
