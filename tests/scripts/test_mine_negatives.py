"""Hard negatives from a teacher, through the command."""

import json

import pytest
import torch

from m3bert.commands import mine_negatives


sentence_transformers = pytest.importorskip("sentence_transformers")


@pytest.fixture
def pairs(tmp_path, sentences):
    file = tmp_path / "pairs.jsonl"
    rows = [{"anchor": sentences[i], "positive": sentences[24 + i]} for i in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, rows


def run(*options: object) -> None:
    mine_negatives.main([str(option) for option in options])


def test_negatives_are_the_closest_that_are_no_answer(encoder_folder, pairs, tmp_path, capsys):
    file, rows = pairs
    output = tmp_path / "out" / "triplets.jsonl"
    run(
        "--teacher_name_or_path", encoder_folder, "--files", file, "--negatives", 3, "--relative_margin", 0,
        "--range_max", 19, "--output_file", output,
    )  # fmt: skip
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert found
    assert f"{output}: {len(found)} of 20 pairs, 3 negatives per pair" in capsys.readouterr().out
    teacher = sentence_transformers.SentenceTransformer(str(encoder_folder))
    candidates = sorted({row["positive"] for row in rows})
    similarities = teacher.similarity(teacher.encode([row["anchor"] for row in found]), teacher.encode(candidates))
    for row, scores in zip(found, similarities, strict=True):
        assert list(row) == ["anchor", "positive", "negative_1", "negative_2", "negative_3"]
        own = scores[candidates.index(row["positive"])]
        order = [candidates[i] for i in scores.argsort(descending=True) if scores[i] < own - 1e-6]
        order = [text for text in order if text not in (row["positive"], row["anchor"])]
        assert [row[f"negative_{n}"] for n in (1, 2, 3)] == order[:3]


def test_the_teacher_computes_as_asked_for(encoder_folder, pairs, tmp_path, monkeypatch):
    seen = {}
    original = sentence_transformers.SentenceTransformer.encode

    def encode(model, *arguments, **options):
        encoder = model.transformers_model
        seen.update(attention=encoder.config._attn_implementation, autocast=torch.is_autocast_enabled("cpu"))
        return original(model, *arguments, **options)

    monkeypatch.setattr(sentence_transformers.SentenceTransformer, "encode", encode)
    line = ["--teacher_name_or_path", encoder_folder, "--files", pairs[0], "--output_file", tmp_path / "out.jsonl"]
    run(*line, "--device", "cpu", "--compute_dtype", "bfloat16", "--attn_implementation", "eager")
    assert seen == {"attention": "eager", "autocast": True}


def test_candidates_of_another_file_but_never_the_query(encoder_folder, pairs, tmp_path, sentences):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(sentences[:20] + sentences[44:48]))
    output = tmp_path / "triplets.jsonl"
    run(
        "--teacher_name_or_path", encoder_folder, "--files", pairs[0], "--corpus_files", corpus, "--negatives", 3,
        "--relative_margin", -9, "--output_file", output,
    )  # fmt: skip
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["anchor"] for row in found] == sentences[:20]
    negatives = [{row[f"negative_{n}"] for n in (1, 2, 3)} for row in found]
    assert not any({row["anchor"], row["positive"]} & its for row, its in zip(found, negatives, strict=True))
    assert set().union(*negatives) & {*sentences[44:48]}
    assert set().union(*negatives) <= {*corpus.read_text().splitlines(), *(row["positive"] for row in pairs[1])}
