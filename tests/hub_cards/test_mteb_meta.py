"""The file for MTEB's repository: MTEB accepts it, and every value is what the checkpoint says."""

import runpy
import shutil
from datetime import date

import pytest

from m3bert.encode.projection import Projection
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.files import RESULTS
from m3bert.hub_cards.metadata import Statements
from m3bert.hub_cards.mteb_meta import mteb_meta, write_mteb_meta
from m3bert.hub_cards.publication import Options, prepare
from m3bert.modeling import M3BertForMaskedLM
from tests.conftest import refused, tiny_config, write_modules
from tests.static_checkpoints import LONGEST, save_static


pytest.importorskip("mteb")
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper
from sentence_transformers import SentenceTransformer


STATEMENTS = Statements(license="apache-2.0", languages=("en", "de"), datasets=("user/pairs",), base_model="user/base")
COMMIT = "0123456789" * 4


def published(source, folder, statements=STATEMENTS, **options) -> Checkpoint:
    folder.mkdir()
    prepare(Checkpoint(source), folder, "user/Model-1", Options(statements=statements, **options))
    return folder


def written(folder, file, **options) -> ModelMeta:
    write_mteb_meta(file, folder, "user/Model-1", **options)
    return runpy.run_path(str(file))["model_1"]


def test_every_value_is_what_the_checkpoint_says(run, coded, tmp_path):
    folder = published(run / "output", tmp_path / "staged")
    meta = written(folder, tmp_path / "model.py", revision=COMMIT)
    ModelMeta.model_validate(meta.model_dump())
    loaded = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    assert meta.loader is SentenceTransformerEncoderWrapper and meta.loader_kwargs == {"trust_remote_code": True}
    assert (meta.name, meta.revision, meta.release_date) == ("user/Model-1", COMMIT, date.today().isoformat())
    assert meta.n_parameters == sum(part.numel() for part in loaded.parameters())
    assert meta.n_embedding_parameters == tiny_config().vocab_size * 32
    assert meta.memory_usage_mb == pytest.approx((folder / "model.safetensors").stat().st_size / 2**20, abs=0.1)
    assert meta.max_tokens == loaded.max_seq_length and meta.embed_dim == [8, 16, 32]
    assert (meta.license, meta.open_weights, meta.languages) == ("apache-2.0", True, ["deu-Latn", "eng-Latn"])
    assert meta.framework == ["Sentence Transformers", "PyTorch", "Transformers", "safetensors"]
    assert (meta.similarity_fn_name.value, meta.use_instructions) == ("cosine", False)
    assert meta.public_training_data == "https://huggingface.co/datasets/user/pairs"
    assert (meta.adapted_from, meta.model_type, meta.modalities) == ("user/base", ["dense"], ["text"])
    assert meta.output_dtypes == ["float32"]
    coded.save(folder / RESULTS)
    assert written(folder, tmp_path / "model.py").output_dtypes == ["float32", "int8", "binary"]


def test_a_router_is_one_and_counts_both_sides(tmp_path, tiny_tokenizer):
    save_static(tmp_path / "model", tiny_tokenizer)
    router = published(tmp_path / "model", tmp_path / "router", format="router")
    meta = written(router, tmp_path / "model.py")
    loaded = SentenceTransformer(str(router), device="cpu")
    assert (meta.model_type, meta.loader_kwargs, meta.embed_dim) == (["router"], {}, 32)
    assert meta.max_tokens == LONGEST, "that of the documents"
    assert meta.n_parameters == sum(part.numel() for part in loaded.parameters())
    rows = 99 + len(tiny_tokenizer)  # the embeddings of the documents, and the table of the queries
    assert meta.n_embedding_parameters == rows * 32
    assert (meta.license, meta.adapted_from, meta.use_instructions) == ("apache-2.0", "user/base", True)


def test_what_nobody_said_is_unknown(run, tmp_path):
    meta = written(published(run / "output", tmp_path / "staged", Statements()), tmp_path / "model.py")
    unknown = ("revision", "release_date", "languages", "license", "public_training_code", "public_training_data")
    unknown += ("training_datasets", "adapted_from", "citation", "contacts")
    assert {name: getattr(meta, name) for name in unknown} == dict.fromkeys(unknown)


def test_prompts_a_projection_and_another_similarity_and_license_are_told(run, tmp_path):
    folder = published(run / "output", tmp_path / "staged", Statements(license="other"))
    before = mteb_meta(folder, "user/model").n_parameters
    prompts = {"query": "query: ", "document": "text: "}
    write_modules(folder, width=32, max_length=20, prompts=prompts, projection=Projection(32, 12))
    similarity, card = folder / "config_sentence_transformers.json", folder / "README.md"
    similarity.write_text(similarity.read_text().replace('"cosine"', '"dot"'))
    link = "https://example.com/license"
    card.write_text(card.read_text().replace("license: other", f"license: other\nlicense_link: {link}"))
    meta = mteb_meta(folder, "user/model")
    assert meta.use_instructions and meta.max_tokens == 20 and meta.similarity_fn_name.value == "dot"
    assert (meta.n_parameters, meta.embed_dim, meta.license) == (before + 32 * 12, [8, 12], link)


def test_a_model_with_a_head_is_refused(run, tmp_path):
    folder = shutil.copytree(run / "output", tmp_path / "head")
    M3BertForMaskedLM(tiny_config()).save_pretrained(folder)
    refused("embeds texts; this is one for AutoModelForMaskedLM", mteb_meta, folder, "user/model")
