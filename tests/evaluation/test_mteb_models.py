"""MTEB's own evaluator over local data, at several granularities, from one encode."""

import pytest
import torch
from datasets import Dataset

from m3bert.encode.precisions import PRECISIONS
from m3bert.evaluation import GridEncoder, as_sentence_transformer, evaluate_grid, find_task
from m3bert.evaluation.readers import load_task
from m3bert.modeling import M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers import Granularity, Grid
from tests.trainers.tiny_run import count_forwards


mteb = pytest.importorskip("mteb", reason="needs the extra mteb")
from mteb.abstasks.retrieval import AbsTaskRetrieval  # noqa: E402
from mteb.types import PromptType  # noqa: E402

from m3bert.evaluation.mteb_models import model_meta, mteb_models, revision_of  # noqa: E402
from tests.evaluation.local_mteb import classification_task, metadata as metadata_of, similarity_task  # noqa: E402


GRID = Grid.parse("2x8,4x16,6x32")


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, GRID)


def test_scores_are_those_of_mtebs_own_run_of_the_encoder_at_each_granularity(
    tiny_model, tiny_tokenizer, data, tmp_path
):
    """With prompts, which MTEB gives to queries and documents alone; and with draws of the task's own generator."""
    pytest.importorskip("sentence_transformers")
    prompts = {"query": "open the ", "document": "read the "}
    encoder = GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("2x8,6x32"), prompts=prompts)
    similarity, labels = (load_task(find_task(name), data) for name in ("stsb", "banking77"))

    def tasks():
        kinds = ("Classification", "MultilabelClassification")
        return [similarity_task(similarity), *(classification_task(labels, kind) for kind in kinds)]

    seen = count_forwards(tiny_model)
    results = evaluate_grid(encoder, tasks(), folder=tmp_path)
    texts = [{*similarity.texts["sentence1"], *similarity.texts["sentence2"]}, {*labels.texts["train"]}]
    assert results.texts["LocalSTS"] == {"texts": len(texts[0])}
    assert sum(seen) == sum(actual["texts"] for actual in results.texts.values()), "each text once for the whole grid"
    assert results.task_types() == ["mteb_sts", "mteb_classification", "mteb_multilabel_classification"]
    assert results.settings["mteb"]["LocalSTS"] == {"type": "STS", "dataset": "local/data", "revision": "1"}
    for g in encoder.grid:
        theirs = mteb.evaluate(as_sentence_transformer(encoder, g), tasks(), cache=None, show_progress_bar=False)
        for result in theirs.task_results:
            ours = results.quality([result.task_name])[g]
            assert ours == pytest.approx(result.get_score(), abs=1e-6), (g, result.task_name)
    assert len({score.value for score in results.scores}) > len(results.tasks()), "granularities differ"


@pytest.mark.slow
def test_mtebs_mock_run_takes_a_granularity(encoder):
    model = mteb_models(encoder, name="local/tiny")[Granularity(4, 16)]
    results = mteb.mock_run(model)
    assert results.all_passed, results.to_markdown()
    assert sum(status is not None for _, status in results.items()) > 20


def test_one_granularity_is_one_row(encoder):
    meta = model_meta(encoder, Granularity(4, 16), "local/tiny", revision_of(encoder))
    assert meta.embed_dim == 16 and meta.max_tokens == 48
    assert meta.experiment_kwargs == {"output_layer": 4, "output_dim": 16} and meta.output_dtypes == "float32"
    coded = model_meta(encoder, Granularity(4, 16, "int8"), "local/tiny", "1")
    assert coded.experiment_kwargs == {"output_layer": 4, "output_dim": 16, "code": "int8"}
    assert len({model_meta(encoder, g, "local/tiny", "1").__hash__() for g in GRID}) == 3


@pytest.fixture
def coded(tiny_model, tiny_tokenizer) -> GridEncoder:
    """An encoder of every code at one size, with a quantizer."""
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=32, layers=[6])).eval()
    quantizer.initialize(torch.randn(300, 32))
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.product([6], [12], PRECISIONS), quantizer=quantizer)


def embedded(model, texts, prompt_type):
    return model.encode([{"text": list(texts[:7])}, {"text": list(texts[7:])}], prompt_type=prompt_type)


@pytest.mark.parametrize("code", PRECISIONS)
def test_similarities_of_a_code_are_those_of_an_index_of_its_bytes(coded, sentences, code):
    """Documents by their bytes; queries in float32, or coded where codes are compared by Hamming distance."""
    pytest.importorskip("faiss")
    pytest.importorskip("sentence_transformers")
    from m3bert.encode.coding import PackedIndex

    model = mteb_models(coded, name="local/tiny")[Granularity(6, 12, code)]
    documents = embedded(model, sentences[:16], PromptType.document)
    queries = embedded(model, sentences[16:24], PromptType.query)
    similarities = model.similarity(queries, documents)
    index = PackedIndex.pack(
        coded.encode(sentences[:16], role="document").widest(6), code, 12, coded.quantizer if "qama" in code else None
    )
    scores, rows = index.search(coded.encode(sentences[16:24]).widest(6), 16)
    torch.testing.assert_close(
        similarities.gather(1, torch.from_numpy(rows)), torch.from_numpy(scores).float(), atol=1e-5, rtol=0
    )


def test_queries_and_documents_have_their_prompts(tiny_model, tiny_tokenizer, sentences, tmp_path):
    """Through MTEB's retrieval evaluator, with embeddings kept on disk for a later run."""
    encoder = GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("2,6x8"), prompts={"document": "open the "})

    class LocalRetrieval(AbsTaskRetrieval):
        metadata = metadata_of("LocalRetrieval", "Retrieval", "ndcg_at_10")

        def load_data(self, **kwargs):
            ids = [str(row) for row in range(20)]
            test = {
                "corpus": Dataset.from_dict({"id": ids, "title": [""] * 20, "text": sentences[:20]}),
                "queries": Dataset.from_dict({"id": ids[:5], "text": sentences[20:25]}),
                "relevant_docs": {query: {ids[3 * int(query)]: 1} for query in ids[:5]},
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": test}}
            self.data_loaded = True

    scores, seen = [], count_forwards(tiny_model)
    for run in range(2):
        for model in mteb_models(encoder, name="local/tiny", folder=tmp_path / "vectors").values():
            result = mteb.evaluate(
                model, LocalRetrieval(), cache=mteb.ResultCache(cache_path=tmp_path / str(run)),
                show_progress_bar=False,
            )  # fmt: skip
            scores.append(result.task_results[0].scores["test"][0]["ndcg_at_10"])
    assert sum(seen) == 25 and scores[:2] == scores[2:]
    queries = encoder.encode(sentences[20:25]).at(Granularity(6, 8))
    documents = encoder.encode(sentences[:20], role="document").at(Granularity(6, 8))
    from m3bert.evaluation import exact_search, ranking_scores

    ranked = exact_search(queries, documents, 20)
    expected = ranking_scores(ranked, [{3 * query: 1.0} for query in range(5)])["ndcg@10"]
    assert scores[1] == pytest.approx(expected, abs=1e-5)
    assert not torch.equal(documents, encoder.encode(sentences[:20]).at(Granularity(6, 8)))
