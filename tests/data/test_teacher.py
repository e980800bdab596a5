"""A teacher's embeddings: its own, found by text, in a cache of their own."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel

from m3bert.data import teacher
from m3bert.trainers import Teacher, TeacherEmbeddings
from tests.conftest import refused, save
from tests.hub_server import Blob, contents


pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer


@pytest.fixture(autouse=True)
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr(teacher, "ROWS_OF_A_BATCH", 8)


def test_embeddings_are_the_teachers_own_and_found_by_text(encoder_folder, sentences, tmp_path):
    texts = [*sentences, sentences[0], "", sentences[3]]
    actual = Teacher(str(encoder_folder)).embed(texts, tmp_path)
    assert (len(actual), actual.width) == (len(set(texts)), 20)
    expected = torch.from_numpy(SentenceTransformer(str(encoder_folder)).encode(texts))
    torch.testing.assert_close(actual.of(texts), expected, atol=1e-5, rtol=1e-5)
    refused("no embedding of 'another text': embed all texts first", actual.of, [sentences[0], "another text"])


def test_a_second_run_does_not_load_the_teacher(encoder_folder, sentences, tmp_path, monkeypatch):
    first = Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    monkeypatch.setattr(Teacher, "load", lambda self: pytest.fail("loaded"))
    again = Teacher(str(encoder_folder), batch_size=3).embed(reversed(sentences), tmp_path)
    assert again.of(sentences).equal(first.of(sentences))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "change", [{"pooling": "cls"}, {"prompt": "a text"}, {"max_length": 5}, {"dtype": "float16"}, "texts", "weights"]
)
def test_another_teacher_or_corpus_has_another_cache(encoder_folder, sentences, tmp_path, change):
    cache = tmp_path / "cache"
    copied = tmp_path / "tiny-bert"
    shutil.copytree(encoder_folder, copied)
    before = Teacher(str(copied)).embed(sentences, cache)
    changed, texts = Teacher(str(copied)), sentences
    if change == "texts":
        texts = [*sentences[1:], "one more text"]
    elif change == "weights":
        model = BertModel.from_pretrained(copied)
        with torch.no_grad():
            model.embeddings.word_embeddings.weight.add_(torch.randn_like(model.embeddings.word_embeddings.weight))
        model.save_pretrained(copied)
        changed = Teacher(str(copied))
    else:
        changed = replace(changed, **change)
    after = changed.embed(texts, cache)
    assert len(list(cache.iterdir())) == 2
    if change != "texts":
        assert not torch.allclose(after.of(sentences[:9]), before.of(sentences[:9]), atol=1e-6)
    assert Teacher(str(encoder_folder)).embed(sentences, cache).of(sentences).equal(before.of(sentences))


def test_poolings_are_those_of_the_token_states_or_the_encoders_own(
    encoder_folder, sentences, tmp_path, tiny_tokenizer
):
    model = BertModel.from_pretrained(encoder_folder).eval()
    batch = tiny_tokenizer(sentences[:6], padding=True, return_tensors="pt")
    with torch.no_grad():
        outputs = model(**batch)
    for pooling, expected in (("cls", outputs.last_hidden_state[:, 0]), ("pooler", outputs.pooler_output)):
        actual = Teacher(str(encoder_folder), pooling=pooling).embed(sentences[:6], tmp_path / "cache")
        torch.testing.assert_close(actual.of(sentences[:6]), expected, atol=1e-5, rtol=1e-5)
    save(tmp_path / "without", BertModel(model.config, add_pooling_layer=False), tiny_tokenizer)
    with pytest.raises(ValueError, match="without has no pooler: choose another pooling, such as cls"):
        Teacher(str(tmp_path / "without"), pooling="pooler").load()


def test_weights_are_those_that_the_hubs_bot_converted(only_hub, encoder_folder, sentences, tmp_path):
    """The main branch has `pytorch_model.bin` alone; a pull request of the bot adds the safetensors made from it."""
    folder = Path(shutil.copytree(encoder_folder, tmp_path / "main"))
    (folder / "model.safetensors").unlink()
    repo = only_hub.publish("user/old", folder)
    with pytest.raises(OSError, match="model.safetensors"):
        Teacher("user/old").load()
    torch.save(BertModel.from_pretrained(encoder_folder).state_dict(), folder / "pytorch_model.bin")
    repo.commit("weights", contents(folder))
    weights = {"model.safetensors": Blob((encoder_folder / "model.safetensors").read_bytes(), False)}
    repo.propose("stranger", "Adding `safetensors` variant of this model", weights)
    repo.propose("SFconvertbot", "Of other weights", {**weights, "pytorch_model.bin": Blob(b"other", False)})
    with pytest.raises(OSError, match="model.safetensors"):
        Teacher("user/old").load()
    repo.propose("SFconvertbot", "Adding `safetensors` variant of this model", weights)
    actual = Teacher("user/old", pooling="pooler").embed(sentences, tmp_path / "cache")
    expected = Teacher(str(encoder_folder), pooling="pooler").embed(sentences, tmp_path / "cache")
    assert actual.of(sentences).equal(expected.of(sentences))
    assert Teacher("user/old", revision="refs/pr/1").load()  # what a user names is not searched for


def test_rows_that_are_not_finite_are_refused_and_others_stay(encoder_folder, sentences, tmp_path, monkeypatch):
    encode = SentenceTransformer.encode
    broken = sorted(set(sentences), key=lambda text: (-len(text), text))[12]

    def with_nan(self, texts, **options):
        vectors = encode(self, texts, **options)
        if broken in texts:
            vectors = vectors.clone()
            vectors[texts.index(broken)] = float("nan")
        return vectors

    monkeypatch.setattr(SentenceTransformer, "encode", with_nan)
    with pytest.raises(ValueError, match=f"1 of 8 texts by .* are not finite as float32, for example of '{broken}'"):
        Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    assert np.load(next(tmp_path.glob("*/done.npy"))).sum() == 1
    monkeypatch.setattr(SentenceTransformer, "encode", encode)
    assert torch.isfinite(Teacher(str(encoder_folder)).embed(sentences, tmp_path).of(sentences)).all()


def test_what_loads_data_elsewhere_shares_the_file(encoder_folder, sentences, tmp_path):
    actual = Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    expected = actual.of(sentences)
    pickled = pickle.dumps(actual)
    assert len(pickled) < 3000 + 16 * len(sentences)
    assert pickle.loads(pickled).of(sentences).equal(expected)


def test_embeddings_of_any_model_can_be_a_teachers(sentences, tmp_path):
    vectors = torch.randn(len(sentences), 8, requires_grad=True)
    actual = TeacherEmbeddings.write(sentences, vectors, tmp_path / "new" / "mine.npy")
    assert actual.of(sentences[5:2:-1]).equal(vectors.detach()[[5, 4, 3]])


def test_principal_components_are_those_of_a_singular_value_decomposition(encoder_folder, sentences, tmp_path):
    actual = Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    vectors = actual.of(sorted(set(sentences))).double()
    expected = torch.linalg.svd(vectors - vectors.mean(dim=0)).Vh[:5]
    components = actual.principal_components(5).double()
    torch.testing.assert_close((components @ expected.T).abs(), torch.eye(5, dtype=torch.float64), atol=1e-4, rtol=0)
