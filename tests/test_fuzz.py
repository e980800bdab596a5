"""Generated input: every text embeds, and a broken file is refused with one line that names it."""

import gzip
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from m3bert.data.files import load_files, require_texts
from m3bert.evaluation import GridEncoder
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.index.corpus import Corpus
from m3bert.modeling import M3BertModel
from m3bert.trainers import Granularity, Grid
from m3bert.trainers.core.checkpoints import load_weights
from tests.conftest import save, tiny_config


def fuzzed(examples: int) -> Callable[[Any], Any]:
    """The same examples in every run, however long one takes. With M3BERT_FUZZ=n, n times as many, others
    each time."""
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


# All of Unicode but lone surrogates, which are no characters.
anything = st.text(max_size=40)
grids = st.text(st.sampled_from("0123456789x,@>; allint8sgfo32\n²٣"), max_size=24) | anything


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
@given(texts=st.lists(anything | st.sampled_from(["", " ", "<pad>", "<pad> <pad>", "\0"]), min_size=1, max_size=4))
def test_every_text_has_a_finite_embedding_that_does_not_depend_on_its_neighbours(encode, texts):
    together = encode(texts)
    assert together.shape == (len(texts), 32) and torch.isfinite(together).all()
    torch.testing.assert_close(encode(texts[:1]), together[:1], atol=1e-5, rtol=1e-4)


# --- Grids ---------------------------------------------------------------------------------------------------------


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


# --- Weights --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "matryoshka_layers": [1]}
    return save(folder, M3BertModel(tiny_config(**sizes, matryoshka_dims=[8], num_attention_heads=2)), tiny_tokenizer)


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
    refused(lambda: list(Corpus([str(file)], column).documents()), file)
