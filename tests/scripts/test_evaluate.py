"""The command that evaluates, on small data, and the one that chooses from what it wrote."""

from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModel

from m3bert.commands import choose, evaluate
from m3bert.encode.device import ComputeArguments
from m3bert.evaluation import GROUPS, GridEncoder, GridResults, find_task, load_task
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.files import EVAL_RESULTS
from m3bert.hub_cards.publication import prepare
from m3bert.trainers import Granularity, Grid
from tests.evaluation_data import write_data, write_nanobeir


TASKS = ["stsb", "mrpc", "tatoeba-deu", "banking77", "cranfield", "stsb-geometry"]
TASK_TYPES = ("sts", "classification", "pair_classification", "retrieval", "bitext")


@pytest.fixture
def data(tmp_path, sentences, monkeypatch):
    monkeypatch.setenv("M3BERT_DATA", str(tmp_path / "data"))
    return write_data(tmp_path / "data", sentences)


def test_evaluate_then_choose(tiny_checkpoint, data, tmp_path, capsys):
    out = tmp_path / "out"
    evaluate.main(
        ["--model_name_or_path", tiny_checkpoint, "--grid", "2,6x8,32", "--output_dir", str(out)]
        + ["--latency_documents", "100", "--tasks", *TASKS]
    )
    printed = capsys.readouterr().out
    assert "| granularity | sts (stsb) |" in printed and "bytes per vector | ms per query |" in printed
    results = GridResults.load(out / "results.json")
    assert results.tasks() == TASKS and results.model == tiny_checkpoint and results.latency.encoder == "m3bert"
    figures = {f"heat_map_{task_type}.png" for task_type in TASK_TYPES}
    figures |= {"quality_and_bytes.png", "quality_and_latency.png", "variances_stsb-geometry.png"}
    assert {file.name for file in out.iterdir()} == {"results.json", "tables.md", *figures}
    assert all((out / name).stat().st_size > 5000 for name in figures)
    tables = (out / "tables.md").read_text()
    value = results.quality(["cranfield"])[Granularity(6, 32)]
    assert f"{100 * value:.1f}" in tables and "6x32" in tables

    choose.main([str(out / "results.json"), "--documents", "1000", "--plans"])
    printed = capsys.readouterr().out
    assert printed.startswith("Judged by cranfield. Deploy ") and "| collection | documents |" in printed


def test_results_say_how_they_were_computed_and_belong_to_the_same_weights(tiny_checkpoint, data, tmp_path):
    line = ["--model_name_or_path", tiny_checkpoint, "--grid", "2,6x32", "--tasks", "stsb", "--device", "cpu"]
    options = {"plain": [], "mixed": ["--compute_dtype", "bfloat16", "--attn_implementation", "eager"]}
    found = {}
    for name, its in options.items():
        evaluate.main([*line, "--latency_documents", "10", "--output_dir", str(tmp_path / name), *its])
        found[name] = GridResults.load(tmp_path / name / "results.json")
    plain, mixed = found["plain"], found["mixed"]
    assert plain.settings["dtype"] == "float32" and plain.settings["attn_implementation"] == "sdpa"
    assert mixed.settings["dtype"] == "bfloat16" and mixed.settings["attn_implementation"] == "eager"
    assert plain.settings["device"] == mixed.settings["device"] == "cpu" and plain.settings["compile"] is False
    assert mixed.weights == plain.weights
    for score, other in zip(plain.scores, mixed.scores, strict=True):
        assert abs(score.value - other.value) < 0.1
    assert any(score.value != other.value for score, other in zip(plain.scores, mixed.scores, strict=True))


@pytest.mark.slow
def test_latency_in_onnxruntime_is_beside_that_in_torch(tiny_checkpoint, data, tmp_path, capsys):
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    line = ["--model_name_or_path", tiny_checkpoint, "--grid", "2,6x8", "--tasks", "stsb"]
    line += ["--output_dir", str(tmp_path), "--overwrite", "--latency_documents", "10", "--latency_onnx"]
    evaluate.main([*line, "2"])
    assert "| layer | torch | ONNX float32 | ONNX int8 |" in capsys.readouterr().out
    results = GridResults.load(tmp_path / "results.json")
    assert {engine: set(times) for engine, times in results.latency.engine_ms.items()} == {
        "ONNX float32": {"2"},
        "ONNX int8": {"2"},
    }


def test_the_timed_encoder_computes_as_the_scored_one(tiny_tokenizer, encoder_folder):
    compute = ComputeArguments(device="cpu", attn_implementation="eager", compute_dtype="bfloat16")
    model = AutoModel.from_pretrained(encoder_folder)
    encoder = GridEncoder(model, tiny_tokenizer, Grid.parse("2x20"), compute_dtype=compute.autocast_dtype)
    timed = evaluate.as_deployed(encoder, compute)
    assert timed.model.config.model_type == "m3bert" and timed.model.config._attn_implementation == "eager"
    assert timed.compute_dtype == torch.bfloat16


def test_an_encoder_with_exits_is_also_searched_between_layers(tiny_checkpoint, tiny_model, data, tmp_path, capsys):
    tiny_model.set_depths(exits={2: (torch.randn(32, 32), torch.randn(32))}, table=torch.randn(99, 32))
    tiny_model.save_pretrained(tiny_checkpoint)

    def evaluated(*options):
        out = tmp_path / "out"
        evaluate.main(
            ["--model_name_or_path", tiny_checkpoint, "--grid", "0,2,4,6x8", "--output_dir", str(out), *options]
            + ["--overwrite", "--latency_documents", "100", "--tasks", "cranfield", "--no_two_stages"]
        )
        return out, GridResults.load(out / "results.json")

    out, results = evaluated()
    assert len(results.asymmetric_searches) == 6 and set(results.latency.encode_ms) == {"0", "2", "4", "6"}
    assert (out / "asymmetric_search.png").stat().st_size > 5000
    assert "| query layer | cranfield, documents at 6 |" in (out / "tables.md").read_text()
    choose.main([str(out / "results.json"), "--documents", "1000", "--plans"])
    assert "| query layer | cranfield, documents at 6 |" in capsys.readouterr().out
    assert len(evaluated("--asymmetric", "True")[1].asymmetric_searches) == 12, "layer 4 has no exit"
    assert evaluated("--asymmetric", "False")[1].asymmetric_searches == []


def test_data_of_ones_own_is_scored_beside_tasks(tiny_checkpoint, data, tmp_path, capsys):
    """A collection, pairs and labels, each under its own name, with Recall at the depths that were asked for."""
    out, mine = tmp_path / "out", data / "cranfield"
    mine.rename(tmp_path / "mine")
    (tmp_path / "topics.tsv").write_text(
        "text\tlabel\n" + "".join(f"open {row} file\t{row % 2}\n" for row in range(20))
    )
    line = ["--model_name_or_path", tiny_checkpoint, "--grid", "2,6x8", "--output_dir", str(out), "--no_latency"]
    line += [
        "--overwrite", "--tasks", "mrpc", "--classification", str(tmp_path / "topics.tsv"), "--retrieval",
        str(tmp_path / "mine"),
    ]  # fmt: skip
    evaluate.main([*line, "--recall", "20", "5", "30", "--query_max_length", "7", "--document_max_length", "9"])
    results = GridResults.load(out / "results.json")
    assert results.tasks() == ["mrpc", "mine", "topics"]
    metrics = {score.metric for score in results.scores if score.task == "mine"}
    assert metrics == {"recall@5", "recall@20", "recall@30", "mrr@10", "ndcg@10", "ndcg_exp@10"}
    assert results.settings["max_lengths"] == {"query": 7, "document": 9}
    assert results.settings["own_data"] == {"mine": "mine", "topics": "topics.tsv"}
    assert str(tmp_path) not in (out / "results.json").read_text().replace(tiny_checkpoint, "")
    choose.main([str(out / "results.json"), "--documents", "1000", "--tasks", "mine"])
    assert capsys.readouterr().out.rpartition("Judged by ")[2].startswith("mine. Deploy ")


def test_nanobeir_mteb_and_own_data_are_in_one_file_that_choose_and_the_card_read(
    tiny_checkpoint, data, sentences, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("mteb", reason="needs the extra mteb")
    from tests.evaluation.local_mteb import classification_task, register, similarity_task

    write_nanobeir(data, sentences)
    stsb, banking77 = (load_task(find_task(name), data) for name in ("stsb", "banking77"))
    register(monkeypatch, similarity_task(stsb), classification_task(banking77))
    (data / "cranfield").rename(tmp_path / "mine")
    evaluate.main(
        ["--model_name_or_path", tiny_checkpoint, "--grid", "2,6x8,32", "--output_dir", str(tmp_path / "out")]
        + ["--tasks", "nanobeir", "banking77", "--mteb", "LocalSTS", "LocalClassification"]
        + ["--retrieval", str(tmp_path / "mine"), "--latency_documents", "100"]
    )
    file = tmp_path / "out" / "results.json"
    results = GridResults.load(file)
    assert results.tasks("retrieval") == [*GROUPS["nanobeir"], "mine"]
    assert results.tasks("mteb_sts") == ["LocalSTS"] and results.tasks("mteb_classification") == [
        "LocalClassification"
    ]
    assert (tmp_path / "out" / "heat_map_mteb_sts.png").is_file() and "mteb" in results.versions
    choose.main([str(file), "--documents", "1000", "--tasks", "nanobeir"])
    assert "Judged by nanobeir-climatefever, " in capsys.readouterr().out
    choose.main([str(file), "--documents", "1000", "--tasks", "mteb_sts"])
    assert "Judged by LocalSTS. Deploy " in capsys.readouterr().out

    (tmp_path / "staged").mkdir()
    prepare(Checkpoint(Path(tiny_checkpoint)), tmp_path / "staged", "user/model", results=results)
    card = ModelCard.load(tmp_path / "staged" / "README.md")
    assert "| `LocalSTS` | semantic similarity (MTEB) | cosine_spearman |" in card.text
    assert "| `banking77` | classification | " in card.text and "not MTEB's protocol" in card.text
    assert "| `nanobeir-nfcorpus` | retrieval |" in card.text
    shown = {(each.task_type, each.dataset_name) for each in card.data.eval_results}
    assert {("STS", "MTEB LocalSTS"), ("Classification", "MTEB LocalClassification")} < shown
    entries = yaml.safe_load((tmp_path / "staged" / EVAL_RESULTS).read_text())
    assert {entry["dataset"]["task_id"] for entry in entries} == {"LocalSTS", "LocalClassification"}
    assert all(entry["dataset"]["revision"] == "1" and "scored by mteb" in entry["notes"] for entry in entries)
    assert entries[0]["value"] == round(100 * results.quality(["LocalSTS"])[Granularity(6, 32)], 4)
