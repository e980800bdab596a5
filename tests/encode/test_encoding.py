"""Encoding a grid once: equal to every granularity alone, in memory or on disk, in one run, several, or processes."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset

from m3bert.encode import encoder as encoding
from m3bert.evaluation import GridEncoder
from m3bert.modeling import M3BertModel
from m3bert.trainers import Granularity, Grid, Projection
from tests.conftest import assert_close, refused, save
from tests.elastic_repositories import WIDTH, save_elastic
from tests.modeling_m3bert.static_models import give_table
from tests.trainers.tiny_run import count_forwards, run_two


GRID = Grid.parse("2,6x8,32")


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, GRID, batch_size=4)


def test_one_encode_equals_loading_every_granularity_alone(encoder, sentences, tmp_path):
    texts = [*sentences[:9], "", "read " * 100]
    encoder.model.train()
    seen = count_forwards(encoder.model)
    embeddings = encoder.encode(texts)
    assert encoder.model.training and sum(seen) == len(texts)
    encoder.model.save_pretrained(tmp_path)
    for g in GRID:
        alone = M3BertModel.from_pretrained(tmp_path, output_layer=g.layer, output_dim=g.dim).eval()
        vectors, unit = embeddings.at(g), embeddings.at(g, normalize=True)
        assert vectors.shape == (11, g.dim) and torch.isfinite(vectors).all()
        assert vectors.data_ptr() == embeddings.layers[g.layer].data_ptr()  # a view
        torch.testing.assert_close(unit, torch.nn.functional.normalize(vectors, dim=1))
        torch.testing.assert_close(embeddings.at(g, [3, 0]), vectors[[3, 0]])
        for row, text in enumerate(texts):
            inputs = encoder.tokenizer(text, truncation=True, return_tensors="pt")
            with torch.no_grad():
                expected = alone(**inputs).last_hidden_state[0].mean(0)
            torch.testing.assert_close(vectors[row], expected, atol=1e-5, rtol=1e-5)
    refused("4x8 is not among the encoded granularities 2,6x8,32", embeddings.at, Granularity(4, 8))


def test_a_look_up_in_the_static_table_equals_the_pooled_states(tiny_model, tiny_tokenizer, sentences):
    """Layer 0 alone runs no layer; beside another layer, its states are pooled."""
    give_table(tiny_model)
    texts = [*sentences[:9], "", "read " * 100]
    both = GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("0,4x8,32"), pooling="cls")
    alone = replace(both, grid=Grid.parse("0x8,32"))
    assert alone.looks_up and not both.looks_up
    tiny_model.train()
    seen = count_forwards(tiny_model)
    actual = alone.encode(texts)
    assert not seen and tiny_model.training
    for dim in (8, 32):
        torch.testing.assert_close(actual.at(Granularity(0, dim)), both.encode(texts).at(Granularity(0, dim)))
    one_by_one = torch.cat([alone.encode([text]).at(Granularity(0, 32)) for text in texts])
    torch.testing.assert_close(one_by_one, actual.at(Granularity(0, 32)))


def test_mixed_precision_is_stored_in_float32_and_is_another_cache(encoder, sentences, tmp_path):
    expected, mixed = encoder.encode(sentences[:9]), replace(encoder, compute_dtype=torch.bfloat16)
    actual = mixed.encode(sentences[:9])
    for layer, vectors in expected.layers.items():
        assert actual.layers[layer].dtype == torch.float32 and not torch.equal(actual.layers[layer], vectors)
        torch.testing.assert_close(actual.layers[layer], vectors, atol=0.1, rtol=0.1)
    assert mixed.identity() == encoder.identity()
    encoder.encode(sentences[:9], folder=tmp_path)
    refused("compute_dtype", mixed.encode, sentences[:9], folder=tmp_path)


def test_batches_have_equal_numbers_of_tokens(encoder, sentences):
    """Two texts of 128 tokens at a time are many short texts, and never more tokens."""
    encoder = replace(encoder, batch_size=2)
    shapes = []
    encoder.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    texts = [*sentences[:24], *[" ".join(sentences[:20])] * 13]
    vectors = encoder.encode(texts).layers[6]
    assert sum(rows for rows, _ in shapes) == len(texts)
    assert all(rows * tokens <= 2 * 128 for rows, tokens in shapes)
    assert max(rows for rows, _ in shapes) > 5  # short texts share a batch
    assert [rows for rows, tokens in shapes if tokens == 48] == [5, 4, 4]  # the limit of the model
    for row in (0, 7, 23, 30):
        torch.testing.assert_close(vectors[row], encoder.encode([texts[row]]).layers[6][0], atol=1e-5, rtol=1e-5)


def test_a_folder_holds_the_same_and_an_interrupted_run_goes_on(encoder, sentences, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "BATCHES_PER_BLOCK", 1)
    texts = sentences[:11]
    expected = encoder.encode(texts)
    seen = count_forwards(encoder.model)

    class PulledPlug(Exception):
        pass

    def stop(module, args, kwargs, output):
        if len(seen) == 2:
            raise PulledPlug

    handle = encoder.model.register_forward_hook(stop, with_kwargs=True)
    with pytest.raises(PulledPlug):
        encoder.encode(texts, folder=tmp_path / "vectors")
    assert not encoder.model.training
    handle.remove()
    again = encoder.encode(texts, folder=tmp_path / "vectors")
    assert sum(seen) == 11 + 4  # the batch that was lost is the only one encoded twice
    encoder.encode(texts, folder=tmp_path / "vectors")
    assert sum(seen) == 11 + 4  # and a finished folder is only read
    for g in GRID:
        assert torch.equal(again.at(g), expected.at(g))
    array = np.load(tmp_path / "vectors" / "layer_6.npy", mmap_mode="r")
    assert array.shape == (11, 32) and array.dtype == np.float32


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"texts": ["another text"] * 11}, "text_fingerprint"),
        ({"max_lengths": {"query": 7}}, "max_length"),
        ({"dtype": torch.float16}, "dtype"),
    ],
)
def test_a_folder_of_something_else_is_refused(encoder, sentences, tmp_path, change, named):
    encoder.encode(sentences[:11], folder=tmp_path)
    texts = change.pop("texts", sentences[:11])
    with pytest.raises(ValueError, match=f"has embeddings made with other settings: {named} differ"):
        replace(encoder, **change).encode(texts, folder=tmp_path)


TWO_PROCESSES = """
import torch.distributed
from transformers import AutoTokenizer
from m3bert.modeling import M3BertModel
from m3bert.trainers import Grid
from m3bert.evaluation import GridEncoder
from m3bert.encode import encoder as encoding
encoding.BATCHES_PER_BLOCK = 1
torch.distributed.init_process_group("gloo")
folder = Path(sys.argv[1])
model, tokenizer = (auto.from_pretrained(folder / "model") for auto in (M3BertModel, AutoTokenizer))
encoder = GridEncoder(model, tokenizer, Grid.parse("2,6x8,32"), batch_size=4)
texts = (folder / "texts.txt").read_text().splitlines()
seen = []
model.register_forward_hook(lambda *arguments: seen.append(1))
encoder.encode(texts, folder=folder / "vectors")
(folder / f"forwards_{torch.distributed.get_rank()}").write_text(str(len(seen)))

from m3bert.commands import embed
embed.main(  # which leaves a group of its caller's alone
    ["--model_name_or_path", str(folder / "model"), "--files", str(folder / "texts.txt"), "--grid", "2,6x8,32"]
    + ["--batch_size", "4", "--format", "parquet", "--output_dir", str(folder / "out")]
)
"""


def test_two_processes_fill_one_folder_and_the_command_one_table(encoder, sentences, tmp_path):
    save(tmp_path / "model", encoder.model, encoder.tokenizer)
    (tmp_path / "texts.txt").write_text("\n".join(sentences[:19]))
    run_two(tmp_path, TWO_PROCESSES)
    assert [(tmp_path / f"forwards_{rank}").read_text() for rank in (0, 1)] == ["3", "2"]
    expected = encoder.encode(sentences[:19])
    for layer in GRID.layers:
        actual = torch.from_numpy(np.load(tmp_path / "vectors" / f"layer_{layer}.npy"))
        assert_close(actual, expected.layers[layer])
    table = Dataset.from_parquet(str(tmp_path / "out" / "embeddings.parquet"), cache_dir=str(tmp_path / "cache"))
    assert table["text"][:] == sentences[:19]
    assert_close(torch.tensor(table["layer_6"][:]), expected.layers[6])


def test_prompts_stand_before_texts_of_their_role(encoder, sentences):
    prompted = replace(encoder, prompts={"document": "open the file "})
    expected = encoder.encode(["open the file " + text for text in sentences[:5]]).at(GRID.full)
    assert torch.equal(prompted.encode(sentences[:5], role="document").at(GRID.full), expected)
    assert torch.equal(prompted.encode(sentences[:5]).at(GRID.full), encoder.encode(sentences[:5]).at(GRID.full))


def test_long_texts_are_cut_and_counted(encoder, sentences, caplog):
    with caplog.at_level(logging.WARNING):
        encoder.encode([*sentences[:5]])
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        long, cut = encoder.encode(["read " * 100, "read " * 46]).at(GRID.full)
    assert "2 of 2 texts reach the maximum of 48 tokens" in caplog.text
    torch.testing.assert_close(long, cut)
    short = replace(encoder, max_length=5).encode(["read " * 100, "read " * 3]).at(GRID.full)
    torch.testing.assert_close(short[0], short[1])
    for length in (0, 49):
        refused(f"max_length={length} must be within 1..48", replace, encoder, max_length=length)


def test_each_role_has_its_own_length(encoder, sentences, caplog):
    """Equal to an encoder with this length for all; a role without a length of its own has the common one."""
    texts = [*sentences[:5], "read " * 40]
    by_role = replace(encoder, max_length=20, max_lengths={"document": 5}, prompts={"document": "open "})
    hand_made = replace(encoder, max_length=5).encode([f"open {text}" for text in texts])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(by_role.encode(texts, role="document").at(GRID.full), hand_made.at(GRID.full))
    assert "reach the maximum of 5 tokens" in caplog.text
    assert torch.equal(
        by_role.encode(texts).at(GRID.full), replace(encoder, max_length=20).encode(texts).at(GRID.full)
    )
    assert [by_role.manifest(texts, role)["max_length"] for role in ("query", "document")] == [20, 5]
    with pytest.raises(ValueError, match=r"query_max_length=49 must be within 1\.\.48, the model's limit"):
        replace(encoder, max_lengths={"query": 49})


SIZES = Grid.parse("0,2,4,6x8,32")


@pytest.mark.parametrize(
    ("kind", "pooling", "normalize"),
    [("bert", "mean", False), ("mpnet", "cls", True), ("modernbert", "mean", True), ("gemma3_text", "mean", False)],
)
def test_every_size_is_that_of_sentence_transformers(kind, pooling, normalize, tmp_path, tiny_tokenizer, sentences):
    library = pytest.importorskip("sentence_transformers")
    save_elastic(tmp_path / "model", tiny_tokenizer, kind, pooling=pooling, normalize=normalize)
    encoder = GridEncoder.from_pretrained(tmp_path / "model", grid=SIZES)
    actual = encoder.encode(sentences[:9])
    for size in SIZES:
        sizes = {"output_layer": size.layer, "output_dim": size.dim}
        model = library.SentenceTransformer(
            str(tmp_path / "model"), device="cpu", trust_remote_code=True, model_kwargs=sizes
        )
        expected = model.encode(sentences[:9], prompt_name="query", convert_to_tensor=True)
        torch.testing.assert_close(actual.at(size), expected, atol=1e-5, rtol=0)


def test_a_projection_follows_the_exits(tmp_path, tiny_tokenizer, sentences):
    """Exits lead to the space before it, so one projection serves all depths with an exit, the table too."""
    save_elastic(tmp_path / "plain", tiny_tokenizer)
    projection = Projection(WIDTH, 12)
    plain = GridEncoder.from_pretrained(tmp_path / "plain", grid="0,2,4,6x32").encode(sentences[:5])
    save_elastic(tmp_path / "model", tiny_tokenizer, projection=projection)
    encoder = GridEncoder.from_pretrained(tmp_path / "plain", projection=projection, grid="0,2,4,6x8,12")
    actual = encoder.encode(sentences[:5])
    alone = GridEncoder.from_pretrained(tmp_path / "plain", projection=projection, grid="0x8").encode(sentences[:5])
    for depth in (0, 2, 4, 6):
        expected = projection(plain.at(Granularity(depth, 32))).detach()
        torch.testing.assert_close(actual.at(Granularity(depth, 12)), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(alone.at(Granularity(0, 8)), actual.at(Granularity(0, 8)), atol=1e-5, rtol=0)
    assert GridEncoder.from_pretrained(tmp_path / "model").grid == Grid.parse("0,2,4,6x12")
    with pytest.raises(ValueError, match=r"The model projects layer 0, 2, 4, 6 to 12 dims; outside of it: 3x12\."):
        GridEncoder.from_pretrained(tmp_path / "model", grid="3x12")
