"""What travels to the Hub, and what never does; what a push does when the Hub refuses."""

import json
import os
import re
import shutil
import socket
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file
from transformers import AutoModel

from m3bert.evaluation import GridResults, MeasuredSearch, evaluate_grid, find_tasks
from m3bert.exits.fit import fit_exits
from m3bert.hub_cards import upload
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.publication import Options, laid_out, prepare
from m3bert.hub_cards.upload import Publication, published_card
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.trainers import Granularity, Grid
from tests.conftest import padded_batch, refused, save, tiny_config
from tests.evaluation_data import write_data
from tests.published import save_with_exits


def lay_out(source: Path, folder: Path, results: GridResults | None = None, **options):
    folder.mkdir()
    return prepare(Checkpoint(source), folder, "user/model", Options(**options), results)


def test_what_travels_is_what_a_user_of_the_model_needs(work, tmp_path):
    for name in ("optimizer.pt", "notes.md", ".env"):
        (work / name).write_text("hf_" + "x" * 34)
    publication = lay_out(work, tmp_path / "staged")
    assert set(publication.sizes()) == {"README.md", *Checkpoint(work).files()}
    assert {"optimizer.pt", "notes.md"} <= set(publication.left_out)
    lines = [line.strip() for line in publication.listing().splitlines()]
    assert lines[0].startswith("user/model: 17 files, ") and "stays here  optimizer.pt" in lines
    weights = publication.folder / "model.safetensors"
    assert weights.read_bytes() == (work / "model.safetensors").read_bytes()


def test_no_path_of_this_machine_is_in_what_travels(work, tmp_path, run):
    results = GridResults.load(run / "results.json")
    publication = lay_out(work, tmp_path / "staged", results)
    for name in publication.sizes():
        content = (publication.folder / name).read_bytes()
        assert not any(str(path).encode() in content for path in (tmp_path, run, os.getcwd())), name
    assert json.loads((publication.folder / "results.json").read_text())["model"] == "user/model"


def test_a_token_in_a_file_stops_it_and_is_not_repeated(work, tmp_path, monkeypatch):
    token = "hf_" + "Ab1" * 12
    monkeypatch.setenv("HF_TOKEN", "secret-of-another-form")
    for number, name in enumerate(("LICENSE", "tokenizer_config.json")):
        text = (work / name).read_text() if (work / name).is_file() else "free"
        (work / name).write_text(f'{text[:-2]}, "note": "{token}"}}' if number else "secret-of-another-form")
        with pytest.raises(ValueError, match=f"{name} holds a token of the Hub") as caught:
            lay_out(work, tmp_path / str(number))
        assert token not in str(caught.value) and "secret" not in str(caught.value)
        (work / name).write_text(text)


@pytest.mark.parametrize(
    ("weights", "settings"),
    [("other", {}), (None, {}), ("same", {"pooling": "cls"}), ("same", {"prompts": {"query": "q: "}})],
)
def test_results_of_another_model_are_refused(work, tmp_path, run, weights, settings):
    results = GridResults.load(run / "results.json")
    results.weights = results.weights if weights == "same" else weights
    results.settings.update(settings)
    message = "do not belong to the weights in|were measured with (pooling|prompts)="
    refused(message, lay_out, work, tmp_path / "staged", results)


def test_code_that_was_lost_on_the_way_is_put_back(work, tmp_path):
    for file in work.glob("*.py"):
        file.unlink()
    publication = lay_out(work, tmp_path / "staged")
    assert {"configuration_m3bert.py", "modeling_m3bert.py"} < set(publication.sizes())


def test_a_part_is_a_complete_model_with_its_own_card_and_scores(run, tmp_path, run_bare):
    results = GridResults.load(run / "results.json")
    publication = lay_out(run / "output", tmp_path / "part", results, granularity=Granularity(2, 16))
    tensors = load_file(publication.folder / "model.safetensors")
    assert not any(name.startswith(("layers.2.", "layers.3.")) for name in tensors)
    batch = padded_batch()
    with torch.no_grad():
        full = AutoModel.from_pretrained(run / "output").eval()(**batch, output_layer=2, output_dim=16)[0]
        part = AutoModel.from_pretrained(publication.folder).eval()(**batch)[0]
    assert torch.equal(full, part)
    scored = GridResults.load(publication.folder / "results.json")
    assert scored.grid == "2x8,16" and {score.granularity for score in scored.scores} == {"2x8", "2x16"}
    card = (publication.folder / "README.md").read_text()
    assert "taken from a larger checkpoint: 2x16 of 6x32" in card
    assert "| 4x" not in card and "spearman at 6x32" not in card
    assert json.loads((publication.folder / "1_Pooling" / "config.json").read_text())["word_embedding_dimension"] == 16
    printed = run_bare(
        """
        from sentence_transformers import SentenceTransformer
        model = SentenceTransformer("part", trust_remote_code=True)
        print(model.encode(["open the file"]).shape, len(model[0].auto_model.layers), model.max_seq_length)
        """
    )
    assert "(1, 16) 2 48" in printed


def test_a_model_with_a_head_keeps_it(tmp_path, tiny_tokenizer):
    folder = tmp_path / "model"
    model = M3BertForMaskedLM(tiny_config()).eval()
    save(folder, model, tiny_tokenizer)
    part = lay_out(folder, tmp_path / "part", granularity=Granularity(4, 16))
    assert "modules.json" not in part.sizes()
    batch = padded_batch()
    with torch.no_grad():
        cut = M3BertForMaskedLM.from_pretrained(part.folder).eval()(**batch).logits
        assert torch.equal(cut, model(**batch, output_layer=4, output_dim=16).logits)


def test_what_is_quantised_has_a_fingerprint_and_is_not_quantised_again(run, tmp_path):
    pytest.importorskip("torchao", reason="torchao is not installed")
    small = lay_out(run / "output", tmp_path / "small", quantize=True)
    assert Checkpoint(small.folder).weights_fingerprint != Checkpoint(run / "output").weights_fingerprint
    size = Granularity(2, 8)
    for number, options in enumerate(({"quantize": True}, {"granularity": size}, {"onnx": (size,)})):
        message = "is already quantised|onnx needs weights in full precision"
        refused(message, lay_out, small.folder, tmp_path / str(number), **options)
    scored = run / "output", tmp_path / "scored", GridResults.load(run / "results.json")
    refused("belong to the weights before quantize", lay_out, *scored, quantize=True)


def test_a_part_can_be_published_from_its_own_folder(run, tmp_path):
    results = GridResults.load(run / "results.json")
    part = lay_out(run / "output", tmp_path / "part", results, granularity=Granularity(2, 16))
    with laid_out_offline(part.folder, tmp_path) as again:
        assert json.loads((again.folder / "results.json").read_text())["grid"] == "2x8,16"


def test_results_in_the_folder_that_are_of_older_weights_stay_there(work, tmp_path, run):
    shutil.copy(run / "results.json", work / "results.json")
    M3BertModel(tiny_config()).save_pretrained(work)
    with laid_out_offline(work, tmp_path) as publication:
        assert "results.json" not in publication.sizes()


@contextmanager
def laid_out_offline(source: Path, tmp_path: Path):
    """Laid out as for a Hub that has no card yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m3bert.hub_cards.publication.published_card", lambda *_: None)
        with laid_out(source, "user/model") as publication:
            yield publication


def test_a_card_that_cannot_be_read_now_stops_a_push_and_no_dry_run(run, monkeypatch):
    def fail(*_):
        raise OSError("The card cannot be read now.")

    monkeypatch.setattr("m3bert.hub_cards.publication.published_card", fail)
    with pytest.raises(OSError, match="cannot be read now"), laid_out(run / "output", "user/model"):
        pass
    with laid_out(run / "output", "user/model", dry_run=True) as publication:  # which replaces nothing
        assert "README.md" in publication.sizes()


# --- A checkpoint with exits ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_exits(tmp_path_factory, tiny_tokenizer, sentences) -> Path:
    """A checkpoint with exits at depths 0, 1, 2, 4 and 6, and its results."""
    folder = tmp_path_factory.mktemp("exits")
    save_with_exits(folder / "model", tiny_tokenizer, sentences)
    write_data(folder / "data", sentences)
    encoder = Checkpoint(folder / "model").encoder(Grid.parse("0,2,6x8,32"))
    results = evaluate_grid(encoder, find_tasks(["stsb", "cranfield"]), folder / "data")
    searches = [
        MeasuredSearch("cranfield", 48, "ndcg@10", 0.4, query_layer=layer, document_layer=6, dim=dim)
        for layer in (0, 2)
        for dim in (8, 32)
    ]
    replace(results, asymmetric_searches=searches).save(folder / "results.json")
    return folder


def test_a_checkpoint_with_exits_keeps_its_fit_its_granularities_and_its_searches(with_exits, tmp_path):
    checkpoint = Checkpoint(with_exits / "model")
    assert checkpoint.depths.exits == [0, 1, 2, 4, 6] and checkpoint.query_layers == [0, 1, 2, 4]
    assert checkpoint.fitted
    results = GridResults.load(with_exits / "results.json")
    folder = lay_out(with_exits / "model", tmp_path / "staged", results).folder
    assert GridResults.load(folder / "results.json").asymmetric_searches == results.asymmetric_searches
    assert (folder / "figures" / "asymmetric_search.png").is_file()
    card, fit = (folder / "README.md").read_text(), checkpoint.depths.fit
    for layer in checkpoint.query_layers:
        one = fit["layers"][str(layer)]
        assert f"| {layer} | {one['penalty']:.2g} | {one['r_squared']:.3f} | {one['cosine']:.3f} |" in card
    assert fit["fingerprint"] in card and "maps that were fitted without training" in card
    assert "It was trained at" not in card and "original encoder remain valid" not in card


@pytest.mark.parametrize("size", ["0x32", "2x16", "4x8"])
def test_a_cut_keeps_its_own_exit_and_the_scores_that_hold_for_it(with_exits, tmp_path, size):
    (granularity,) = Grid.parse(size)
    results = GridResults.load(with_exits / "results.json")
    scored = results if granularity.layer in (0, 2) else None
    folder = lay_out(with_exits / "model", tmp_path / "part", scored, granularity=granularity).folder
    names = set(load_file(folder / "elastic" / "weights.safetensors"))
    exits = {name.split(".")[1] for name in names if name.startswith("exits")}
    assert exits == ({str(granularity.layer)} if granularity.layer else set())  # depth 0 is the table itself
    assert "table" in names and (granularity.layer > 0) == bool(load_file(folder / "model.safetensors"))
    batch, options = padded_batch(), {"output_layer": granularity.layer, "output_dim": granularity.dim}
    with torch.no_grad():
        full = AutoModel.from_pretrained(with_exits / "model").eval()(**batch, **options)[0]
        part = AutoModel.from_pretrained(folder).eval()(**batch)[0]
    assert torch.equal(full, part)
    part_of = Checkpoint(folder)
    assert part_of.depths.exits == [granularity.layer] and part_of.query_layers == []
    assert {g.layer for g in part_of.grid} == {granularity.layer}, "the exits of the other layers are gone"
    card = (folder / "README.md").read_text()
    assert "Its vectors can be compared with those of the larger checkpoint" in card and "for_queries" not in card
    exits = card.partition("<!-- section: exits")[2].partition("<!-- end of section")[0]
    assert re.findall(r"^\| (\d+) \| [\d.]+ \| -?\d", exits, re.MULTILINE) == [str(granularity.layer)]
    if scored is not None:
        results = GridResults.load(folder / "results.json")
        assert {g.layer for g in results.granularities} == {granularity.layer} and results.asymmetric_searches == []


def test_an_index_of_the_original_encoder_stays_valid_where_nothing_changed_it(tmp_path, tiny_tokenizer, sentences):
    save_with_exits(tmp_path / "model", tiny_tokenizer, sentences, converted_from="user/base")
    said = "vectors from the original encoder remain valid"
    assert said not in (lay_out(tmp_path / "model", tmp_path / "rotated").folder / "README.md").read_text()
    model = M3BertModel(tiny_config(converted_from="user/base"))
    fit_exits(model, tiny_tokenizer, sentences, layers=[3])
    model.save_pretrained(tmp_path / "model")
    card = (lay_out(tmp_path / "model", tmp_path / "plain").folder / "README.md").read_text()
    assert said in card and "Vectors of depths 0 and 3 can" in " ".join(card.split()) and "48 unlabelled texts" in card
    del model.config.elastic["fit"]
    model.save_pretrained(tmp_path / "model")
    card = (lay_out(tmp_path / "model", tmp_path / "unknown").folder / "README.md").read_text()
    assert "How they were made is not on record." in card and said not in card


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as closed:  # bound but not listening: it refuses connections
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(upload, "HfApi", lambda token: HfApi(endpoint, token))
        with pytest.raises(OSError, match=r"user/model was not pushed; push again to continue") as error:
            Publication(tmp_path, "user/model", ["optimizer.pt"]).upload(token="hf_secret")
    assert "\n" not in str(error.value) and "hf_secret" not in str(error.value)


def test_a_card_that_cannot_be_read_now_is_not_taken_for_none(monkeypatch):
    """Otherwise a push would replace what a person wrote there."""
    answers = [LocalEntryNotFoundError("no connection")]

    def fail(*_, **__):
        raise answers[-1]

    monkeypatch.setattr(upload, "hf_hub_download", fail)
    with pytest.raises(OSError, match="no connection"):
        published_card("user/model")
    answers.append(RepositoryNotFoundError("none", response=SimpleNamespace(headers={}, request=None)))
    assert published_card("user/model") is None
