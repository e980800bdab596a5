"""
Files as 2026-11-26 wrote them: every later version reads them and computes the same.

    python -m tests.test_frozen SCRATCH_FOLDER        # writes them anew, only where a format is left behind on purpose
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from m3bert.evaluation import GridEncoder, evaluate_grid, find_tasks
from m3bert.evaluation.results import GridResults
from m3bert.index import Corpus, Index, Plan
from m3bert.modeling import M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers import Granularity, Grid
from tests.conftest import WORDS, word_tokenizer
from tests.elastic_repositories import save_elastic
from tests.evaluation_data import write_data
from tests.static_checkpoints import save_static


FOLDER = Path(__file__).with_name("frozen")
GRIDS = {"native": "0,2,4,6x8,32", "m3bert": "0,2,6x8,32@float32,int8,qama-2"}
TASKS = ["stsb", "cranfield"]
TEXTS = [" ".join(WORDS[(7 * row + step * step) % len(WORDS)] for step in range(4 + row % 5)) for row in range(48)]


def encoder_of(name: str) -> GridEncoder:
    return GridEncoder.from_pretrained(FOLDER / name, grid=GRIDS[name])


def vectors_of(name: str) -> dict[str, torch.Tensor]:
    """Granularity -> embeddings of some texts."""
    encoded = encoder_of(name).encode(TEXTS[:7])
    return {str(g): encoded.at(g).contiguous() for g in Grid.parse(GRIDS[name]) if g.code == "float32"}


def quality_of(results: GridResults) -> dict[str, float]:
    return {str(g): value for g, value in results.quality(TASKS).items()}


def plan_encoder() -> GridEncoder:
    return GridEncoder.from_pretrained(FOLDER / "m3bert", grid="6x32")


def hits_of(folder: Path) -> list[list[Any]]:
    with Index.open(folder, plan_encoder()) as index:
        return [[(hit.id, hit.text, round(hit.score, 5)) for hit in hits] for hits in index.search(TEXTS[:5], 4)]


def write(scratch: Path) -> None:
    """Write all frozen files."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.manual_seed(0)
    save_elastic(FOLDER / "native", word_tokenizer(), source=None)
    shutil.rmtree(FOLDER / "native-source")
    save_static(FOLDER / "m3bert", word_tokenizer(), num_hidden_layers=6)
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=32)).eval()
    plain = GridEncoder.from_pretrained(FOLDER / "m3bert", grid="6x32")
    quantizer.initialize(plain.encode(TEXTS).at(Granularity(6, 32)))
    quantizer.save_pretrained(FOLDER / "m3bert" / "quantizer")
    for code in FOLDER.rglob("*.py"):  # the code of this version reads them
        code.unlink()
    for name in GRIDS:
        save_file(vectors_of(name), FOLDER / f"{name}.safetensors")
    tasks = find_tasks(TASKS)
    results = evaluate_grid(encoder_of("m3bert"), tasks, write_data(scratch / "data", TEXTS), asymmetric=True)
    results.save(FOLDER / "results.json")
    corpus = scratch / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": f"d{row}", "text": text}) + "\n" for row, text in enumerate(TEXTS)))
    plan = Plan(Granularity(6, 32), first_dim=8, shortlist=20)
    Index.build(FOLDER / "index", "faiss", plan, plan_encoder(), Corpus([str(corpus)], id_column="id")).close()
    expected = {"quality": quality_of(results), "hits": hits_of(FOLDER / "index")}
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


@pytest.mark.parametrize("name", GRIDS)
def test_a_frozen_checkpoint_has_the_same_vectors(name):
    found, expected = vectors_of(name), load_file(FOLDER / f"{name}.safetensors")
    assert found.keys() == expected.keys()
    for granularity, vectors in expected.items():
        torch.testing.assert_close(found[granularity], vectors, atol=1e-5, rtol=1e-5)


def test_a_frozen_results_file_has_the_same_scores():
    expected = json.loads((FOLDER / "expected.json").read_text())["quality"]
    assert quality_of(GridResults.load(FOLDER / "results.json")) == pytest.approx(expected)


def test_a_frozen_index_finds_the_same_documents(tmp_path):
    pytest.importorskip("faiss")
    shutil.copytree(FOLDER / "index", tmp_path / "index")
    for found, expected in zip(
        hits_of(tmp_path / "index"), json.loads((FOLDER / "expected.json").read_text())["hits"], strict=True
    ):
        assert [hit[:2] for hit in found] == [tuple(hit[:2]) for hit in expected]
        assert [hit[2] for hit in found] == pytest.approx([hit[2] for hit in expected], abs=1e-4)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
