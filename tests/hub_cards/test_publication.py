"""What travels to the Hub, and what never does."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file
from transformers import AutoModel

from hub_cards.checkpoint import Checkpoint
from hub_cards.metadata import Statements
from hub_cards.publication import Options, laid_out, prepare
from hub_cards.upload import published_card
from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from tests.conftest import padded_batch, tiny_config
from tests.published import contrastive_trainer, evaluated
from trainers import Granularity
from trainers.evaluation import GridResults


@pytest.fixture(scope="module")
def output(tmp_path_factory, tiny_tokenizer, sentences) -> Path:
    """The folder that a training run leaves, with all that is in it."""
    folder = tmp_path_factory.mktemp("run") / "output"
    trainer = contrastive_trainer(folder, tiny_tokenizer, sentences)
    trainer.train()
    trainer.save_model()
    evaluated(folder, folder.parent / "data", sentences, latency=False).save(folder.parent / "results.json")
    return folder


@pytest.fixture
def work(output, tmp_path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(output, tmp_path / "work"))


def lay_out(source: Path, folder: Path, results: GridResults | None = None, **options):
    folder.mkdir()
    return prepare(Checkpoint(source), folder, "user/model", Options(**options), results)


def test_what_travels_is_what_a_user_of_the_model_needs(work, tmp_path):
    for name in ("optimizer.pt", "data.jsonl", "notes.md", "pytorch_model.bin", ".env", "events.out.tfevents"):
        (work / name).write_text("hf_" + "x" * 34)
    publication = lay_out(work, tmp_path / "staged")
    assert set(publication.sizes()) == {
        "1_Pooling/config.json",
        "README.md",
        "config.json",
        "config_sentence_transformers.json",
        "configuration_m3bert.py",
        "model.safetensors",
        "modeling_m3bert.py",
        "modules.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    left = publication.left_out
    assert left["optimizer.pt"] == "state of the training run" == left["training_args.json"]
    assert left["checkpoint-2/model.safetensors"] == "a training checkpoint" and left["data.jsonl"] == "data"
    assert left["notes.md"] == "not part of a checkpoint" == left["events.out.tfevents"]
    assert "runs code" in left["pytorch_model.bin"]
    listing = publication.listing()
    assert f"{(work / 'model.safetensors').stat().st_size:>15,}  model.safetensors" in listing
    assert "stays here  optimizer.pt: state of the training run" in listing
    weights = publication.folder / "model.safetensors"
    assert weights.read_bytes() == (work / "model.safetensors").read_bytes()


def test_no_path_of_this_machine_is_in_what_travels(work, tmp_path, output):
    results = GridResults.load(output.parent / "results.json")
    publication = lay_out(work, tmp_path / "staged", results)
    for name in publication.sizes():
        content = (publication.folder / name).read_bytes()
        assert not any(str(path).encode() in content for path in (tmp_path, output.parent, os.getcwd())), name
    assert json.loads((publication.folder / "results.json").read_text())["model"] == "user/model"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "training.json"])
def test_a_token_in_a_file_stops_it_and_is_not_repeated(work, tmp_path, name):
    token = "hf_" + "Ab1" * 12
    content = json.loads((work / name).read_text())
    content["columns" if name == "training.json" else "note"] = [token]
    (work / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="holds a token of the Hub") as caught:
        lay_out(work, tmp_path / "staged")
    assert token not in str(caught.value)


def test_the_users_own_token_is_found_whatever_its_form(work, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-of-another-form")
    with pytest.raises(ValueError, match="README.md holds a token"):
        lay_out(work, tmp_path / "staged", statements=Statements(tags=("secret-of-another-form",)))
    (work / "LICENSE").write_text("secret-of-another-form")
    with pytest.raises(ValueError, match="LICENSE holds a token"):
        lay_out(work, tmp_path / "other")


def test_a_link_out_of_the_checkpoint_is_refused(work, tmp_path):
    outside = tmp_path / "secrets.json"
    outside.write_text("{}")
    (work / "added_tokens.json").symlink_to(outside)
    with pytest.raises(ValueError, match="added_tokens.json is a link that leads out of"):
        lay_out(work, tmp_path / "staged")


@pytest.mark.parametrize(
    "gone, message",
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "no weights in safetensors"),
        ("tokenizer_config.json", "has no tokenizer"),
    ],
)
def test_an_incomplete_checkpoint_is_refused(work, tmp_path, gone, message):
    (work / gone).unlink()
    with pytest.raises(ValueError, match=message):
        lay_out(work, tmp_path / "staged")


def test_an_adapter_alone_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="--merge_adapter"):
        lay_out(tmp_path / "adapter", tmp_path / "staged")


def test_weights_that_are_cut_short_are_refused(work, tmp_path):
    file = work / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors"):
        lay_out(work, tmp_path / "staged")


def test_results_of_other_weights_are_refused(work, tmp_path, output, tiny_tokenizer):
    results = GridResults.load(output.parent / "results.json")
    M3BertModel(tiny_config()).save_pretrained(work)
    with pytest.raises(ValueError, match="not of the weights in"):
        lay_out(work, tmp_path / "staged", results)
    results.weights = None
    with pytest.raises(ValueError, match="do not say which weights"):
        lay_out(work, tmp_path / "other", results)


def test_code_that_was_lost_on_the_way_is_put_back(work, tmp_path):
    for file in work.glob("*.py"):
        file.unlink()
    publication = lay_out(work, tmp_path / "staged")
    assert {"configuration_m3bert.py", "modeling_m3bert.py"} < set(publication.sizes())


def test_a_part_is_a_complete_model_with_its_own_card_and_scores(output, tmp_path, run_bare):
    results = GridResults.load(output.parent / "results.json")
    publication = lay_out(output, tmp_path / "part", results, granularity=Granularity(2, 16))
    tensors = load_file(publication.folder / "model.safetensors")
    assert not any(name.startswith(("layers.2.", "layers.3.")) for name in tensors)
    batch = padded_batch()
    with torch.no_grad():
        full = AutoModel.from_pretrained(output).eval()(**batch, output_layer=2, output_dim=16)[0]
        part = AutoModel.from_pretrained(publication.folder).eval()(**batch)[0]
    assert torch.equal(full, part)
    scored = GridResults.load(publication.folder / "results.json")
    assert scored.grid == "2x8,16" and {score.granularity for score in scored.scores} == {"2x8", "2x16"}
    card = (publication.folder / "README.md").read_text()
    assert "complete in itself: 2x16 of 6x32" in card and "| 4x" not in card and "spearman at 6x32" not in card
    assert json.loads((publication.folder / "1_Pooling" / "config.json").read_text())["word_embedding_dimension"] == 16
    printed = run_bare(
        """
        from sentence_transformers import SentenceTransformer
        model = SentenceTransformer("part", trust_remote_code=True)
        print(model.encode(["open the file"]).shape, len(model[0].auto_model.layers), model.max_seq_length)
        """
    )
    assert "(1, 16) 2 48" in printed


def test_only_an_m3bert_can_be_cut(tmp_path, minilm):
    with pytest.raises(ValueError, match="convert it first"):
        lay_out(Path(minilm), tmp_path / "staged", granularity=Granularity(2, 64))


def test_a_granularity_outside_of_the_model_is_refused(output, tmp_path):
    with pytest.raises(ValueError, match="output_layer=3 is not available here; legal values: 2, 4, 6"):
        lay_out(output, tmp_path / "staged", granularity=Granularity(3, 16))


def test_a_model_with_a_head_keeps_it(tmp_path, tiny_tokenizer):
    folder = tmp_path / "model"
    model = M3BertForMaskedLM(tiny_config()).eval()
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    part = lay_out(folder, tmp_path / "part", granularity=Granularity(4, 16))
    assert "modules.json" not in part.sizes()
    batch = padded_batch()
    with torch.no_grad():
        cut = M3BertForMaskedLM.from_pretrained(part.folder).eval()(**batch).logits
        assert torch.equal(cut, model(**batch, output_layer=4, output_dim=16).logits)


def test_results_of_another_reading_are_refused(work, tmp_path, output):
    results = GridResults.load(output.parent / "results.json")
    results.settings["pooling"] = "anchor"
    with pytest.raises(ValueError, match="results are of pooling 'anchor'; the checkpoint is published with 'mean'"):
        lay_out(work, tmp_path / "staged", results)
    results.settings |= {"pooling": "mean", "prompts": {"query": "q: "}}
    with pytest.raises(ValueError, match="results are of prompts"):
        lay_out(work, tmp_path / "other", results)


def test_results_of_full_precision_are_not_those_of_8_bits(output, tmp_path):
    results = GridResults.load(output.parent / "results.json")
    with pytest.raises(ValueError, match="before they are quantised"):
        lay_out(output, tmp_path / "staged", results, quantize=True)


def test_what_is_quantised_has_a_fingerprint_and_is_not_quantised_again(output, tmp_path):
    pytest.importorskip("torchao", reason="the extra quantization is not installed")
    small = lay_out(output, tmp_path / "small", quantize=True)
    assert Checkpoint(small.folder).weights_fingerprint != Checkpoint(output).weights_fingerprint
    for options in ({"quantize": True}, {"granularity": Granularity(2, 8)}):
        with pytest.raises(ValueError, match="quantised already"):
            lay_out(small.folder, tmp_path / str(len(list(tmp_path.iterdir()))), **options)
    with pytest.raises(ValueError, match="full precision"):
        lay_out(small.folder, tmp_path / "graph", onnx=(Granularity(2, 8),))


def test_no_graph_is_wider_than_what_is_published(output, tmp_path):
    with pytest.raises(ValueError, match="No graph of 2x32: what is published has the full size 2x16"):
        lay_out(output, tmp_path / "staged", granularity=Granularity(2, 16), onnx=(Granularity(2, 32),))


def test_a_part_can_be_published_from_its_own_folder(output, tmp_path):
    results = GridResults.load(output.parent / "results.json")
    part = lay_out(output, tmp_path / "part", results, granularity=Granularity(2, 16))
    with laid_out_offline(part.folder, tmp_path) as again:
        assert json.loads((again.folder / "results.json").read_text())["grid"] == "2x8,16"


def test_results_in_the_folder_that_are_of_older_weights_stay_there(work, tmp_path, output):
    shutil.copy(output.parent / "results.json", work / "results.json")
    M3BertModel(tiny_config()).save_pretrained(work)
    with laid_out_offline(work, tmp_path) as publication:
        assert "results.json" not in publication.sizes()


@contextmanager
def laid_out_offline(source: Path, tmp_path: Path):
    """Laid out as for a Hub that has no card yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hub_cards.publication.published_card", lambda *_: None)
        with laid_out(source, "user/model") as publication:
            yield publication


@pytest.mark.parametrize("name", ["model", "a/b/c", "no spaces/here"])
def test_a_repository_needs_an_owner_and_a_legal_name(output, name):
    with pytest.raises(ValueError, match="owner|Repo id"), laid_out(output, name):
        pass


def test_all_shards_must_be_there(tmp_path, tiny_tokenizer):
    folder = tmp_path / "sharded"
    M3BertModel(tiny_config()).save_pretrained(folder, max_shard_size="60KB")
    tiny_tokenizer.save_pretrained(folder)
    *_, last = sorted(folder.glob("model-*.safetensors"))
    last.unlink()
    with pytest.raises(ValueError, match=f"lacks {last.name}"):
        lay_out(folder, tmp_path / "staged")


def test_only_code_that_loading_runs_travels(work, tmp_path):
    (work / "train.py").write_text("print('mine')")
    publication = lay_out(work, tmp_path / "staged")
    assert publication.left_out["train.py"] == "not part of a checkpoint"


def test_a_card_that_cannot_be_read_now_is_not_taken_for_none(output, monkeypatch):
    """Else a push would replace what a person wrote there."""

    def fail(*_, **__):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("hub_cards.upload.hf_hub_download", fail)
    with pytest.raises(OSError, match="card of user/model on the Hub cannot be read now"):
        published_card("user/model")
    with pytest.raises(OSError, match="cannot be read now"), laid_out(output, "user/model"):
        pass
    with laid_out(output, "user/model", dry_run=True) as publication:  # which replaces nothing
        assert "README.md" in publication.sizes()
