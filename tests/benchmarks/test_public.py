"""The study of public benchmarks: priced, resumed, and in a table."""

import json

import pytest

from benchmarks.reproduction import public
from benchmarks.reproduction.tables import measurements
from m3bert.evaluation import find_task
from m3bert.evaluation.readers import load_task
from m3bert.evaluation.tasks import GROUPS
from tests.evaluation_data import write_data, write_nanobeir


def test_a_third_a_half_and_two_thirds_of_the_layers():
    assert public.sizes_of(12, 768) == ([4, 6, 8], [128, 256, 768])
    assert public.sizes_of(6, 384) == ([2, 3, 4], [64, 128, 384])


def test_the_study_is_priced_then_fitted_scored_and_written(tiny_checkpoint, sentences, tmp_path, monkeypatch, capsys):
    pytest.importorskip("mteb", reason="needs the extra mteb")
    from tests.evaluation.local_mteb import register, similarity_task

    data = tmp_path / "data"
    write_data(data, sentences)
    write_nanobeir(data, sentences)
    register(monkeypatch, similarity_task(load_task(find_task("stsb"), data)))
    monkeypatch.setenv("M3BERT_DATA", str(data))
    monkeypatch.setattr(public, "MTEB", {"STS": ("LocalSTS",)})
    monkeypatch.setattr(public, "RESULTS", tmp_path / "results" / "public")
    monkeypatch.setattr(public, "PER_SOURCE", 60)
    rows = [{column: f"{text} {row}" for _, column in public.FIT_TEXTS} for row, text in enumerate(sentences[:80])]
    monkeypatch.setattr(public, "load_hub", lambda name, streaming: rows)
    command = [tiny_checkpoint, "--output_dir", str(tmp_path / "out")]
    public.main([*command, "--price"])
    assert "520 texts of 14 tasks; about " in capsys.readouterr().out and not (tmp_path / "out").exists()
    public.main(command)
    (file,) = (tmp_path / "results" / "public").glob("*.json")
    content = json.loads(file.read_text())
    assert {*content["texts"]} == {*GROUPS["nanobeir"], "LocalSTS"}
    sizes = {f"{layer}x{dim}" for layer in (0, 2, 3, 4, 6) for dim in (5, 10, 32)}
    assert {family: {*values} for family, values in content["scores"].items()} == {
        "NanoBEIR": sizes, "STS": sizes, "NanoBEIR, documents by all layers": sizes - {f"6x{d}" for d in (5, 10, 32)}
    }  # fmt: skip
    monkeypatch.setattr(public.fit, "main", None)
    monkeypatch.setattr(public.evaluate, "main", None)
    file.unlink()
    public.main(command)
    assert json.loads(file.read_text())["scores"] == content["scores"], "finished steps are skipped"
    monkeypatch.setattr(measurements, "HERE", tmp_path)
    assert "model | NanoBEIR | STS | NanoBEIR, documents by all layers |" in measurements.public()


def test_the_table_is_empty_before_the_first_run(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "HERE", tmp_path)
    assert measurements.public().startswith("| size | NanoBEIR | STS |")
