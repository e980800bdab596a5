"""sentence-transformers' own trainer trains a published checkpoint, and saves one that is as elastic as before."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from m3bert.evaluation import GridEncoder
from m3bert.modeling import M3BertModel
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Grid
from tests.conftest import save, tiny_config


pytest.importorskip("sentence_transformers")

TRAIN = """
import json
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

sentences = json.loads(open("sentences.json").read())
model = SentenceTransformer("untrained", trust_remote_code=True, device="cpu")
loss = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), matryoshka_dims=[32, 16, 8])
arguments = SentenceTransformerTrainingArguments(
    "run", max_steps=4, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=1, save_strategy="no",
    report_to="none", use_cpu=True, disable_tqdm=True,
)
pairs = Dataset.from_dict({"anchor": sentences[:24], "positive": sentences[24:]})
trainer = SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss)
trainer.train()
print("LOSSES", json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
model.save_pretrained("trained")
"""
READ = """
import json
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

texts, vectors = json.loads(open("sentences.json").read())[:5], {}
for layer, dim in ((2, 8), (4, 16), (6, 32)):
    model = SentenceTransformer(
        "trained", trust_remote_code=True, truncate_dim=dim, model_kwargs={"output_layer": layer}, device="cpu"
    )
    assert len(model[0].auto_model.layers) == layer
    vectors[f"{layer}x{dim}"] = model.encode(texts, convert_to_tensor=True)
save_file(vectors, "vectors.safetensors")
"""


@pytest.mark.slow
def test_their_trainer_trains_and_saves_it(tiny_tokenizer, sentences, tmp_path, run_bare):
    pooling = "cls"  # which is not their default
    before = M3BertModel(tiny_config())
    save(tmp_path / "untrained", before, tiny_tokenizer, max_length=32, pooling=pooling)
    (tmp_path / "sentences.json").write_text(json.dumps(sentences))
    printed = run_bare(TRAIN)
    (line,) = [line for line in printed.splitlines() if line.startswith("LOSSES")]
    losses = json.loads(line.removeprefix("LOSSES"))
    assert len(losses) == 4 and all(0 < loss < 100 for loss in losses)

    run_bare(READ)
    after = M3BertModel.from_pretrained(tmp_path / "trained")
    still = [
        name
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
        if torch.equal(old, new)
    ]
    assert not still
    assert EmbeddingSettings.read(str(tmp_path / "trained")).pooling == pooling
    tokenizer, grid = AutoTokenizer.from_pretrained(tmp_path / "trained"), Grid.parse("2x8,4x16,6x32")
    found = GridEncoder(after, tokenizer, grid, pooling=pooling).encode(sentences[:5])
    for name, vectors in load_file(tmp_path / "vectors.safetensors").items():
        (granularity,) = Grid.parse(name)
        torch.testing.assert_close(vectors, found.at(granularity), atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert config["is_matryoshka"] and config["matryoshka_dimensions"] == [8, 16, 32]
