"""MTEB runs a published checkpoint by its name, with its own loader, and scores it as this project does."""

import os
import shutil
import tempfile

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from m3bert.evaluation import GridEncoder
from m3bert.modeling import M3BertModel
from m3bert.trainers import Granularity, Grid
from tests.ecosystem.conftest import LONGEST


pytestmark = pytest.mark.slow
mteb = pytest.importorskip("mteb")
pytest.importorskip("sentence_transformers")

from mteb.abstasks.retrieval import AbsTaskRetrieval  # noqa: E402
from mteb.models import SentenceTransformerEncoderWrapper  # noqa: E402
from mteb.models.get_model_meta import MODEL_REGISTRY  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402

from m3bert.evaluation.mteb_models import model_meta, mteb_models  # noqa: E402
from tests.evaluation.local_mteb import metadata as metadata_of  # noqa: E402


NAME, GRID = "user/model", Grid.parse("2,4,6x64,384")
PROMPTS = {"query": "question: ", "document": "answer: "}


class LocalRetrieval(AbsTaskRetrieval):
    """Each of some sentences is to be found by its words in another order."""

    metadata = metadata_of("LocalRetrieval", "Retrieval", "ndcg_at_10")
    texts: list[str] = []

    def load_data(self, **kwargs):
        ids = [str(row) for row in range(len(self.texts))]
        questions = [" ".join(sorted(text.split())) for text in self.texts]
        test = {
            "corpus": Dataset.from_dict({"id": ids, "title": [""] * len(ids), "text": self.texts}),
            "queries": Dataset.from_dict({"id": ids, "text": questions}),
            "relevant_docs": {query: {query: 1} for query in ids},
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": test}}
        self.data_loaded = True


@pytest.fixture
def encoder(published) -> GridEncoder:
    return GridEncoder(
        M3BertModel.from_pretrained(published), AutoTokenizer.from_pretrained(published), GRID, max_length=LONGEST,
        prompts=PROMPTS,
    )  # fmt: skip


@pytest.fixture
def score(sentences, tmp_path):
    """Scores of a model in MTEB's evaluation of the made-up task."""

    def run(model) -> dict[str, float]:
        task = LocalRetrieval()
        task.texts = sentences
        cache = mteb.ResultCache(cache_path=tempfile.mkdtemp(dir=tmp_path))  # nothing is read from an earlier run
        result = mteb.evaluate(model, task, cache=cache, show_progress_bar=False)
        return result.task_results[0].scores["test"][0]

    return run


def test_a_registered_model_runs_by_name_at_any_granularity(published, encoder, score, tmp_path, monkeypatch):
    """Of the kind that is contributed to MTEB; a folder of this name stands for the Hub."""
    (tmp_path / "user").mkdir()
    shutil.copytree(published, tmp_path / NAME, copy_function=os.link)
    monkeypatch.chdir(tmp_path)
    meta = model_meta(encoder, Granularity(6, 384), NAME, "no_revision").model_copy(
        update={
            "loader": SentenceTransformerEncoderWrapper,
            "loader_kwargs": {"trust_remote_code": True, "model_prompts": PROMPTS}, "embed_dim": GRID.dims,
            "experiment_kwargs": None, "revision": None,
        }
    )  # fmt: skip
    monkeypatch.setitem(MODEL_REGISTRY, NAME, meta)
    ours = mteb_models(encoder, name=NAME)
    found = {}
    for g in (Granularity(2, 64), Granularity(4, 64), Granularity(6, 384)):
        model = mteb.get_model(NAME, device="cpu", embed_dim=g.dim, model_kwargs={"output_layer": g.layer})
        assert model.mteb_model_meta.embed_dim == g.dim
        found[g] = score(model)["ndcg_at_10"]
        assert found[g] == pytest.approx(score(ours[g])["ndcg_at_10"], abs=1e-4)
    assert len({round(value, 4) for value in found.values()}) == 3, "granularities differ"


def test_a_sentence_transformer_is_evaluated_as_it_is(published, encoder, score):
    """Which is how a folder that is on no Hub is evaluated: MTEB's `get_model` takes no paths."""
    model = SentenceTransformer(
        str(published), trust_remote_code=True, truncate_dim=64, model_kwargs={"output_layer": 4}, device="cpu",
        prompts=PROMPTS,
    )  # fmt: skip
    ours = mteb_models(encoder, name=NAME)[Granularity(4, 64)]
    assert score(model)["ndcg_at_10"] == pytest.approx(score(ours)["ndcg_at_10"], abs=1e-4)
