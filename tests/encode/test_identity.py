"""
One identity of an encoder: every place that keeps something of an encoder, and every part of the identity.

The places were found by the names of files that are written (`EmbeddingStore`, `KeptParts`, `save`, `key_of`) and by
every use of a digest. The parts are changed one at a time.
"""

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from tokenizers.normalizers import Replace

from m3bert.encode import embedding_store
from m3bert.encode.identity import config_values
from m3bert.evaluation import GridEncoder, evaluate_grid, find_tasks
from m3bert.evaluation.mteb_models import revision_of
from m3bert.exits import kept as kept_parts
from m3bert.exits.raw_states import RawStates
from m3bert.index.plan import encoder_identity, require_same_encoder
from m3bert.modeling import M3BertModel
from m3bert.trainers import Grid, Teacher, TeacherEmbeddings, fit_exits
from tests.conftest import WORDS, tiny_config, word_tokenizer
from tests.evaluation_data import write_data
from tests.exits.test_fit import random_texts
from tests.trainers.tiny_run import count_forwards


TEXTS = sorted({*random_texts(80)})


def fresh(**changes: Any) -> GridEncoder:
    """The same encoder at each call, with other entries of its config if `changes` name some."""
    torch.manual_seed(0)
    model = M3BertModel(tiny_config(num_hidden_layers=2, matryoshka_layers=[], matryoshka_dims=[], **changes)).eval()
    return GridEncoder(model, word_tokenizer(), Grid.parse("2x32"), max_length=30, prompts={"query": "read "})


def changed_weight() -> GridEncoder:
    encoder = fresh()
    encoder.model.layers[1].mlp.down_proj.weight.data[-1, -1] += 1  # no version of the tensor tells
    return encoder


def changed_tokenizer(**sides: str) -> GridEncoder:
    encoder = fresh()
    for name, side in sides.items():
        setattr(encoder.tokenizer, name, side)
    if not sides:
        encoder.tokenizer.backend_tokenizer.normalizer = Replace("e", "a")
    return encoder


ENCODERS: dict[str, Callable[[], GridEncoder]] = {
    "weights": changed_weight,
    "heads": lambda: fresh(num_attention_heads=2),
    "activation": lambda: fresh(hidden_act="relu"),
    "epsilon": lambda: fresh(norm_eps=1e-3),
    "rope": lambda: fresh(position_embedding_type="rope", rope_parameters={"rope_type": "default", "rope_theta": 9e3}),
    "tokenizer": changed_tokenizer,
    "truncation side": lambda: changed_tokenizer(truncation_side="left"),
    "pooling": lambda: replace(fresh(), pooling="cls"),
    "prompts": lambda: replace(fresh(), prompts={"query": "open "}),
    "longest text": lambda: replace(fresh(), max_length=20),
    "precision": lambda: replace(fresh(), compute_dtype=torch.bfloat16),
    "dims": lambda: replace(fresh(), grid=Grid.parse("2x16")),
}
UNCHANGED = {
    "nothing": fresh,
    "its folder and heads": lambda: fresh(name_or_path="elsewhere", id2label={0: "a"}, architectures=["Other"]),
    "its dropout": lambda: fresh(hidden_dropout=0.5),
}


def fitted(encoder: GridEncoder, folder: Path, texts: Any = TEXTS, **options: Any) -> bool:
    """Whether a fit encodes anything but the queries that it measures, which no part keeps."""
    passes: list[int] = []
    encode = RawStates.pooled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RawStates,
            "pooled",
            lambda raw, ids, layers, **more: passes.append(len(ids) * (not more)) or encode(raw, ids, layers, **more),
        )
        options = {"pooling": encoder.pooling, "compute_dtype": encoder.compute_dtype} | options
        options = {"max_length": encoder.max_length, "prompts": [*encoder.prompts.values()]} | options
        fit_exits(encoder.model, encoder.tokenizer, texts, layers=[1], cache_dir=folder, **options)
    return sum(passes) > 0


def stored(encoder: GridEncoder, folder: Path) -> bool:
    seen = count_forwards(encoder.model)
    try:
        encoder.encode(TEXTS, folder=folder / "vectors")
    except ValueError as error:
        assert "embeddings made with other settings" in str(error)
        return True
    return bool(seen)


def indexed(encoder: GridEncoder, folder: Path) -> bool:
    """Whether an index of the first encoder refuses this one."""
    file, actual = folder / "index.json", encoder_identity(encoder)
    if not file.is_file():
        file.write_text(json.dumps(actual))
        return True
    try:
        require_same_encoder(json.loads(file.read_text()), actual, "The index")
    except ValueError:
        return True
    return False


def scored(encoder: GridEncoder, folder: Path, texts: list[str] = TEXTS) -> bool:
    seen = count_forwards(encoder.model)
    try:
        evaluate_grid(
            encoder, find_tasks(["stsb"]), write_data(folder / "data", texts), unfinished=folder / "results.json"
        )
    except ValueError as error:
        assert "has results of another run" in str(error)
        return True
    return bool(seen)


def named(encoder: GridEncoder, folder: Path) -> bool:
    """Whether MTEB's cache has another place for the results of this encoder."""
    place = folder / revision_of(encoder)
    place.mkdir(exist_ok=True)
    known, before = {*folder.iterdir()}, {*folder.glob("known-*")}
    (folder / f"known-{place.name}").touch()
    return {*folder.glob("known-*")} != before and place in known


PLACES = {"fit": fitted, "embeddings": stored, "index": indexed, "results": scored, "mteb": named}
# An index is searched in any precision, and its plan has the dims; a fit is of all dims.
FREE = {("index", "precision"), ("index", "dims"), ("fit", "dims")}


@pytest.mark.parametrize("place", PLACES)
def test_every_part_of_an_encoder_is_known_in_every_place(place, tmp_path):
    for part, make in {**UNCHANGED, **ENCODERS}.items():
        folder = tmp_path / part.replace(" ", "-")
        folder.mkdir()
        assert PLACES[place](fresh(), folder), "the first time"
        anew = PLACES[place](make(), folder)
        assert anew is (part in ENCODERS and (place, part) not in FREE), (place, part)


def test_what_a_fit_reads_is_known_to_the_last_row(tmp_path):
    """Texts, where their sources end, targets of the last row, and prompts whose tokens the table ignores."""
    halves = {"a": TEXTS[:40], "b": TEXTS[40:]}
    vectors = torch.randn(len(TEXTS), 12, generator=torch.Generator().manual_seed(0))
    other = vectors.clone()
    other[-1] *= -1
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "texts": (TEXTS, {}),
        "another text": ([*TEXTS[:-1], "read the file"], {}),
        "sources": (halves, {"prompts": ["read ", "open "]}),
        "their ends": ({"a": TEXTS[:39], "b": TEXTS[39:]}, {"prompts": ["read ", "open "]}),
        "vectors": (TEXTS, {"teacher": TeacherEmbeddings(TEXTS, vectors.numpy())}),
        "the last vector": (TEXTS, {"teacher": TeacherEmbeddings(TEXTS, other.numpy())}),
        "ignored tokens": (TEXTS, {"prompts": ["read ", "list "]}),
    }
    for again in (False, True):
        for name, (texts, options) in given.items():
            assert fitted(fresh(), tmp_path, texts, **options) is not again, name


def test_a_version_of_the_code_is_a_part(tmp_path, monkeypatch):
    assert fitted(fresh(), tmp_path) and stored(fresh(), tmp_path)
    monkeypatch.setattr(kept_parts, "VERSION", kept_parts.VERSION + 1)
    monkeypatch.setattr(embedding_store, "VERSION", 2)
    assert fitted(fresh(), tmp_path) and stored(fresh(), tmp_path)


def test_data_that_changed_are_scored_again(tmp_path, caplog):
    assert scored(fresh(), tmp_path) and not scored(fresh(), tmp_path)
    assert scored(fresh(), tmp_path, TEXTS[::-1])
    assert "The data of stsb has changed" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "of another fit", "foreign"])
def test_a_kept_part_that_cannot_be_read_is_named_and_made_anew(tmp_path, caplog, damage):
    encoder = fresh()
    fit_exits(encoder.model, encoder.tokenizer, TEXTS, layers=[1], cache_dir=tmp_path / "cache")
    expected = copy.deepcopy(encoder.model.elastic.state_dict())
    files = sorted((tmp_path / "cache").iterdir())
    assert {file.suffix for file in files} == {".safetensors"} and len(files) == 3
    for file in files:
        if damage == "cut":
            file.write_bytes(file.read_bytes()[:-9])
        else:
            save_file({"content": torch.zeros(3)}, file, {"key": "1"} if damage == "foreign" else None)
    again = fresh()
    with caplog.at_level(logging.WARNING):
        fit_exits(again.model, again.tokenizer, TEXTS, layers=[1], cache_dir=tmp_path / "cache")
    assert all(f"{file} cannot be read" in caplog.text for file in files)
    assert all(torch.equal(again.model.elastic.state_dict()[name], item) for name, item in expected.items())


def test_what_an_earlier_version_did_not_record_is_not_compared(tmp_path, caplog):
    """An index without digests of config and tokenizer is opened, and a folder of embeddings read, with a warning."""
    assert indexed(fresh(), tmp_path) and stored(fresh(), tmp_path)
    for file in (tmp_path / "index.json", tmp_path / "vectors" / "manifest.json"):
        content = json.loads(file.read_text())
        for name in ("config", "tokenizer", "version"):
            content.pop(name, None)
        file.write_text(json.dumps(content | {"model": "user/model"}))
    assert not indexed(fresh(), tmp_path) and not stored(fresh(), tmp_path)
    assert "does not say with which config, tokenizer its embeddings were made" in caplog.text
    assert indexed(changed_weight(), tmp_path) and stored(changed_weight(), tmp_path)


def test_adapters_are_parts_of_the_config():
    peft = pytest.importorskip("peft")
    encoder = fresh()
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(encoder.model, peft.LoraConfig(lora_alpha=8, **options))
    encoder = replace(encoder, model=model)
    actual = [encoder.identity()["config"], encoder.identity()["config"]]
    with model.disable_adapter():
        actual.append(encoder.identity()["config"])
    model.base_model.model.layers[0].self_attn.q_proj.scaling["default"] *= 2
    actual.append(encoder.identity()["config"])
    assert actual[0] == actual[1] and len({*actual}) == 3


@pytest.mark.parametrize("part", ["nothing", "weights", "tokenizer", "config", "prompts", "longest text", "dtype"])
def test_a_teacher_in_memory_is_known_by_all_its_parts(encoder_folder, tmp_path, part):
    """The model is changed in place, also after it was asked."""
    model, texts = SentenceTransformer(str(encoder_folder), device="cpu"), [*WORDS]
    teacher = Teacher("tiny", model=model)
    teacher.embed(texts, tmp_path)
    if part == "weights":
        next(model.parameters()).data += 1
    elif part == "tokenizer":
        model.tokenizer.backend_tokenizer.normalizer = Replace("e", "a")
    elif part == "config":
        model.transformers_model.config.num_attention_heads = 5
    elif part == "prompts":
        model.prompts, model.default_prompt_name = {"query": "read "}, "query"
    elif part == "longest text":
        model.max_seq_length = 5
    elif part == "dtype":
        model.to(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        patch.setattr(model, "encode", lambda rows, **more: seen.extend(rows) or torch.zeros(len(rows), 20))
        teacher.embed(texts, tmp_path)
    assert bool(seen) is (part != "nothing")


def test_a_config_is_known_by_what_differs_from_its_class():
    """An entry that a later version of transformers adds, with its default, makes no other encoder."""
    values = config_values(tiny_config())
    assert {"norm_type", "transformers_version", "dtype", "attention_dropout"}.isdisjoint(values), (
        "defaults, no effect"
    )
    assert values["model_type"] == "m3bert" and "hidden_size" in values
