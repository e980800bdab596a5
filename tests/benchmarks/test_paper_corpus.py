"""The training corpus of MIPIC and MIC: how many texts and pairs of each data set, and what is refused."""

import gzip
import json

import pytest

from benchmarks.reproduction import paper_corpus


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Training sets with ten rows more than are drawn. The pairs of WiC share their second sentence."""
    for name, size in paper_corpus.SIZES.items():
        rows = [{"text": f"{name}\n text  {row}"} for row in range(size + 10)]
        if size == 1500:
            seconds = ["a shared one" if name == "wic" else f"{name} second {row}" for row in range(size + 10)]
            rows = [{"sentence1": f"{name} first {row}", "sentence2": two} for row, two in enumerate(seconds)]
        (tmp_path / name).mkdir()
        with gzip.open(tmp_path / name / "train.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setenv("M3BERT_DATA", str(tmp_path))
    return tmp_path


def test_the_corpus_has_the_sizes_of_the_papers(data, tmp_path, capsys):
    file = tmp_path / "new" / "sentences.txt"
    paper_corpus.main([str(file)])
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) == 18_000 - 1499 and "16,501 sentences" in capsys.readouterr().out
    counts = {name: sum(line.startswith(f"{name} ") for line in lines) for name in paper_corpus.SIZES}
    assert counts == {"banking77": 3000, "tweet-sentiment-extraction": 3000, "wic": 1500} | dict.fromkeys(
        ("stsb", "sick", "mrpc"), 3000
    )
    firsts, seconds = ({line.split()[-1] for line in lines if f"stsb {side} " in line} for side in ("first", "second"))
    assert firsts == seconds, "pairs are drawn, not sentences"
    assert all("text" not in line or line.split(" ")[1] == "text" for line in lines), "one text per line"
    assert paper_corpus.paper_corpus(data) == lines != paper_corpus.paper_corpus(data, seed=1)


def test_what_is_missing_is_named_and_left_out(data, tmp_path, capsys):
    (data / "wic" / "train.jsonl.gz").unlink()
    paper_corpus.main([str(tmp_path / "sentences.txt")])
    printed = capsys.readouterr().out
    assert "wic is left out: there is no 'train'" in printed and "15,000 sentences" in printed
