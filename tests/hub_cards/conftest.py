"""What the tests of hub_cards share: a finished run, and a made-up evaluation."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase, set_seed

from m3bert.encode.precisions import PRECISIONS
from m3bert.evaluation import GridResults, Latency, MeasuredSearch, Score
from m3bert.trainers import Grid
from tests.published import contrastive_trainer, evaluated


ABOUT = {"model": "user/model", "seed": 0, "date": "2026-11-21", "machine": "a machine", "versions": {}}
SETTINGS = {"pooling": "mean", "max_length": 64, "prompts": {}}


@pytest.fixture(scope="session")
def run(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]
) -> Path:
    """Folder of a finished run: the checkpoint and all else that training leaves in `output`, and `results.json`."""
    set_seed(0)
    folder = tmp_path_factory.mktemp("run")
    trainer = contrastive_trainer(folder / "output", tiny_tokenizer, sentences, learning_rate=3e-4)
    trainer.train()
    trainer.save_model()
    evaluated(folder / "output", folder / "data", sentences).save(folder / "results.json")
    return folder


@pytest.fixture
def work(run: Path, tmp_path: Path) -> Path:
    """A copy of the run's output that a test may change."""
    return Path(shutil.copytree(run / "output", tmp_path / "work"))


@pytest.fixture(params=["2,6x8,32", "2x8,4x16,6x32"])
def results(request: pytest.FixtureRequest) -> GridResults:
    """An evaluation over a product and over a list of granularities."""
    grid = Grid.parse(request.param)
    tasks = {
        "stsb": ("sts", "spearman"), "sick": ("sts", "spearman"), "cranfield": ("retrieval", "ndcg@10"),
        "stsb-geometry": ("geometry", "uniformity"),
    }  # fmt: skip
    scores = [
        Score(task, task_type, "test", metric, True, str(g), (g.layer + g.dim / 100) / 10 + 0.1 * (task == "sick"))
        for task, (task_type, metric) in tasks.items()
        for g in grid
    ]
    stages = {"first_dim": 8, "second_dim": 32, "shortlist": 50, "products_share": 0.3}
    return GridResults(
        **ABOUT,
        revision="abc",
        grid=str(grid),
        settings=dict(SETTINGS),
        scores=scores,
        two_stage_searches=[MeasuredSearch("cranfield", 1398, "ndcg@10", 0.5, 6, **stages)],
        variances={"stsb-geometry": {str(layer): [1.0, 2.0, 0.5] for layer in grid.layers}},
        latency=Latency({"2": 2.0, "4": 3.0, "6": 5.0}, {"8": 1.0, "16": 2.0, "32": 3.0}, {}, 100, "m3bert", 2),
    )


@pytest.fixture
def coded() -> GridResults:
    """An evaluation over codes: what it loses grows as the bits get fewer."""
    grid = Grid.parse("4,6x8,16@float32,int8,qama-2,binary")
    tasks = {
        "stsb": ("sts", "spearman", 0.8), "cranfield": ("retrieval", "ndcg@10", 0.5),
        "cisi": ("retrieval", "ndcg@10", 0.6),
    }  # fmt: skip
    lost = {code: place / 100 for place, code in enumerate(PRECISIONS)}
    scores = [
        Score(task, task_type, "test", metric, True, str(g), value * (1 - lost[g.code]) * (1 + g.layer / 10) / 2)
        for task, (task_type, metric, value) in tasks.items()
        for g in grid
    ]
    searches = [
        MeasuredSearch(
            task,
            documents,
            "ndcg@10",
            0.4 + gained + shortlist / 1000,
            6,
            dim,
            code=code,
            rescore=rescore,
            shortlist=shortlist,
        )  # fmt: skip
        for task, documents in (("cranfield", 1398), ("cisi", 1460))
        for dim in (8, 16)
        for code in ("qama-2", "binary")
        for rescore, gained in (("codes", 0.0), ("int8", 0.01), ("float32", 0.02))
        for shortlist in (10, 100)
    ]
    return GridResults(
        **ABOUT, revision=None, grid=str(grid), settings=dict(SETTINGS), scores=scores, rescored_searches=searches,
        latency=Latency({"4": 3.0, "6": 5.0}, {"8": 1.0, "16": 2.0}, {}, 100, "m3bert", 2),
    )  # fmt: skip
