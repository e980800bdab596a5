"""
Generated input: every text embeds, and every broken file is refused with one line that names it. What failed once is a
case of its own in `test_broken_files.py`.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from safetensors.torch import load_file, save_file

from hub_cards.checkpoint import Checkpoint
from modeling_m3bert import EmbeddingSettings, M3BertModel
from scripts.recipes import read_recipes
from tests.conftest import tiny_config, write_modules
from trainers import Granularity, Grid
from trainers.core.checkpoints import load_weights
from trainers.core.composition import mapping_of
from trainers.data.files import load_files, require_texts, stream_files
from trainers.evaluation import GridEncoder, GridResults
from trainers.hub.training_record import TrainingRecord
from trainers.index.corpus import Corpus
from trainers.index.plan import Plan


def fuzzed(examples: int) -> Callable[[Any], Any]:
    """The same examples in every run, however long one takes. With M3BERT_FUZZ=n, which `make soak` sets, n times as
    many, others each time."""
    unlimited = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    more = os.environ.get("M3BERT_FUZZ")
    return settings(
        max_examples=examples * int(more or 1), derandomize=more is None, deadline=None, database=None,
        suppress_health_check=unlimited,
    )  # fmt: skip


def refused(read: Callable[[], Any], name: str | Path = "") -> None:
    """Reads, or raises an error that a user can act on: one line, with the name of the file."""
    try:
        read()
    except (ValueError, OSError) as error:
        said = str(error).strip()
        assert said and "\n" not in said, repr(error)
        assert str(name) in said, f"{name} is not in {error!r}"


SURROGATES = re.compile("[\ud800-\udfff]")
# All of Unicode, with lone surrogates and NUL.
anything = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
grids = st.text(st.sampled_from("0123456789x,@>; allint8sgfo32\n²٣"), max_size=24) | anything
values = st.none() | st.booleans() | st.integers() | st.floats() | anything
contents = st.recursive(
    values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(anything, inner, max_size=3)
)


@st.composite
def changed(draw: st.DrawFn, content: Any) -> Any:
    """JSON content of which one part, at any depth, is missing, added or replaced."""
    if not content or not isinstance(content, dict | list) or draw(st.integers(0, 3)) == 0:
        return draw(contents)
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key, what = draw(st.sampled_from(keys)), draw(st.sampled_from(["drop", "add", "change", "change"]))
    copy = dict(content) if isinstance(content, dict) else list(content)
    if what == "drop":
        del copy[key]
    elif what == "add":
        copy.update({draw(anything): draw(values)}) if isinstance(copy, dict) else copy.append(draw(values))
    else:
        copy[key] = draw(changed(content[key]))
    return copy


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """Bytes that are cut, or of which one is another; most often near the beginning."""
    places = st.integers(0, min(len(data), 400) - 1) | st.integers(0, len(data) - 1)
    flipped = st.tuples(places, st.integers(1, 255)).map(
        lambda at: data[: at[0]] + bytes([data[at[0]] ^ at[1]]) + data[at[0] + 1 :]
    )
    return places.map(lambda end: data[:end]) | flipped


# --- Texts --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encode(tiny_tokenizer) -> Callable[[list[str]], torch.Tensor]:
    """Embeddings of texts by a tiny model at its full size."""
    torch.manual_seed(0)
    encoder = GridEncoder(M3BertModel(tiny_config()).eval(), tiny_tokenizer, Grid.parse("2,6x8,32"))
    return lambda texts: encoder.encode(texts).at(Granularity(6, 32))


@fuzzed(15)
@given(
    texts=st.lists(
        anything.filter(lambda text: not SURROGATES.search(text))
        | st.sampled_from(["", " ", "<pad>", "<pad> <pad>", "\0"]),
        min_size=1,
        max_size=4,
    )
)
def test_every_text_has_a_finite_embedding_that_does_not_depend_on_its_neighbours(encode, texts):
    together = encode(texts)
    assert together.shape == (len(texts), 32) and torch.isfinite(together).all()
    torch.testing.assert_close(encode(texts[:1]), together[:1], atol=1e-5, rtol=1e-4)


@fuzzed(20)
@given(before=anything, half=st.characters(categories=["Cs"]), after=anything)
def test_a_lone_surrogate_is_no_text(encode, before, half, after):
    with pytest.raises(ValueError, match=r"^['\"].*['\"] is not text: it has half of a surrogate pair\.$"):
        encode(["a name", before + half + after])


# --- Words of the command line, and recipes -------------------------------------------------------------------------


GRIDS = 20  # of one example: drawing them is what costs


@fuzzed(20)
@given(texts=st.lists(grids, min_size=GRIDS, max_size=GRIDS))
def test_a_grid_is_read_back_from_its_words_or_refused(texts):
    for text in texts:
        refused(partial(Grid.parse, text))
        refused(partial(Granularity.parse, text))
        with suppress(ValueError):
            assert Grid.parse(str(Grid.parse(text))) == Grid.parse(text)
        refused(partial(Grid.parse("2,4x8,16").pairs, text))


@fuzzed(150)
@given(
    text=anything
    | contents.map(lambda content: yaml.safe_dump(content))
    | st.text("{}[]:-&*!|>#'\" \n\tab1", max_size=20)
)
def test_a_recipe_is_a_mapping_or_refused(text, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(lambda: read_recipes([str(file)]), file)
    refused(lambda: mapping_of("--pic", text), "--pic")


# --- JSON files -----------------------------------------------------------------------------------------------------


RESULTS = {
    "model": "user/model", "revision": None, "grid": "2,6x8", "seed": 0, "date": "2026-11-25", "machine": "x",
    "versions": {"torch": "2"}, "settings": {"pooling": "mean"}, "seconds": {"stsb": {"encode": 1.0}},
    "scores": [
        {"task": "stsb", "task_type": "sts", "split": "test", "metric": "spearman", "main": True,
         "granularity": "2x8", "value": 0.5}
    ],
    "two_stage_searches": [], "rescored_searches": [], "hybrid_searches": [], "variances": {}, "texts": {},
    "asymmetric_searches": [
        {"task": "cisi", "documents": 9, "query_layer": 2, "document_layer": 6, "dim": 8, "metric": "ndcg@10",
         "value": 0.4}
    ],
    "latency": {"encode_ms": {"2": 1.0}, "search_ms": {"8": 1.0}, "rerank_ms": {}, "documents": 9,
                "encoder": "m3bert", "threads": 1},
    "weights": "ab", "schema_version": 6,
}  # fmt: skip
PLAN = {"documents": "6x8@int8", "query_layer": 2, "rescore": "float32", "shortlist": 10, "tasks": ["cisi"],
        "encoder": {"weights": "ab"}}  # fmt: skip
RECORD = {"trainer": "T", "objective": "MRL", "parts": [], "tags": [], "grid": "2,6x8", "base_model": None,
          "earlier": [], "settings": {}, "columns": ["a"], "rows": 3, "datasets": [], "steps": 2, "batch_size": 4,
          "seed": 0}  # fmt: skip
READERS: dict[str, tuple[Any, Callable[[Path], Any]]] = {
    "results.json": (RESULTS, GridResults.load),
    "plan.json": (PLAN, Plan.load),
    "training.json": (RECORD, lambda file: TrainingRecord.find(file.parent)),
}


@pytest.mark.parametrize("name", READERS)
@fuzzed(120)
@given(data=st.data())
def test_a_json_file_of_ours_is_read_or_refused(name, data, tmp_path):
    content, read = READERS[name]
    file = tmp_path / name
    file.write_text(json.dumps(content))
    read(file)
    file.write_text(json.dumps(data.draw(changed(content))), encoding="utf-8")
    refused(lambda: read(file), file)
    file.write_bytes(data.draw(damaged(json.dumps(content).encode())))
    refused(lambda: read(file), file)


SETTINGS = ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "sentence_bert_config.json",
            "config_sentence_transformers.json")  # fmt: skip


@fuzzed(150)
@given(data=st.data(), name=st.sampled_from(SETTINGS))
def test_settings_of_sentence_transformers_are_read_or_refused(data, name, tmp_path):
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    (tmp_path / "model").mkdir()
    projection = torch.nn.Linear(8, 4)
    write_modules(tmp_path / "model", width=8, max_length=48, projection=projection, prompts={"query": "q: "})
    file = tmp_path / "model" / name
    content = json.loads(file.read_text())
    file.write_text(json.dumps(data.draw(changed(content))), encoding="utf-8")
    refused(lambda: EmbeddingSettings.find(tmp_path / "model"))
    file.write_bytes(data.draw(damaged(json.dumps(content).encode())))
    refused(lambda: EmbeddingSettings.find(tmp_path / "model"))


# --- Weights --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "matryoshka_layers": [1]}
    M3BertModel(tiny_config(**sizes, matryoshka_dims=[8], num_attention_heads=2)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def read_weights(folder: Path) -> None:
    """Read them in every way there is."""
    errors = (ValueError, OSError, RuntimeError)  # what M3BertModel documents
    model = None
    with suppress(*errors):
        model = M3BertModel.from_pretrained(folder)
    assert model is None or all(value.dtype == torch.float32 for value in model.parameters())
    refused(lambda: Checkpoint(folder), folder)
    refused(lambda: GridEncoder.from_pretrained(folder), folder)
    config = M3BertModel.config_class.from_pretrained(folder)
    refused(lambda: load_weights(M3BertModel(config), str(folder)), folder)


@fuzzed(40)
@given(data=st.data())
def test_weights_that_are_cut_or_changed_are_read_or_refused(data, saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "model", dirs_exist_ok=True))
    file = folder / "model.safetensors"
    file.write_bytes(data.draw(damaged((saved / file.name).read_bytes())))
    read_weights(folder)


@fuzzed(30)
@given(data=st.data())
def test_tensors_that_are_missing_or_of_another_kind_are_read_or_refused(data, saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "model", dirs_exist_ok=True))
    tensors = load_file(saved / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(tensors)))
    change = data.draw(st.sampled_from(["missing", "extra", "int64", "bool", "float16", "float64", "shape", "empty"]))
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors[data.draw(st.text("abc.", min_size=1))] = torch.ones(2)
    elif change == "shape":
        tensors[name] = torch.ones(3, 5)
    elif change == "empty":
        tensors[name] = torch.ones(0)
    else:
        tensors[name] = tensors[name].to(getattr(torch, change))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    read_weights(folder)


# --- Data files -----------------------------------------------------------------------------------------------------


LINES = [b'{"anchor": "a", "positive": "b", "label": 1.0}', b'{"anchor": "c", "positive": "d", "label": 0.5}']
TABLE = [b"anchor,positive,label", b"a,b,1.0", b'"c, c",d,0.5']


@fuzzed(25)
@given(data=st.data(), suffix=st.sampled_from([".jsonl", ".csv", ".tsv", ".txt", ".jsonl.gz", ".csv.gz", ".parquet"]))
def test_a_data_file_is_read_or_refused(data, suffix, tmp_path, monkeypatch):
    lines = TABLE if suffix.startswith((".csv", ".tsv")) else LINES
    odd = [b"", b"\xff", b"NaN", b'{"anchor": 1}', b'{"anchor": null}', b"[1]", b"\x00", b"a", b'"', b"x,y,z,w"]
    mixed = data.draw(st.permutations([*lines, *data.draw(st.lists(st.sampled_from(odd), max_size=2))]))
    start, end = (
        data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])),
        data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"])),
    )
    content = start + end.join(mixed)
    content = gzip.compress(content) if suffix.endswith(".gz") else content
    content = data.draw(st.just(content) | damaged(content))
    assume(content)
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(content)

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    column = "text" if suffix == ".txt" else "anchor"
    refused(lambda: load_files([str(file)]), file)
    refused(lambda: require_texts(load_files([str(file)]), [column]))
    refused(lambda: list(stream_files([str(file)])), file)
    refused(lambda: list(Corpus([str(file)], column).documents()), file)
