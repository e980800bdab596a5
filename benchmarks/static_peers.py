"""
A query without a transformer, and its peers, on one encoder (all-MiniLM-L6-v2), the same texts, and the same scorer:
the static table of exits (layer 0), model2vec's `distill`, BM25, and the encoder at full depth.

    python -m benchmarks.static_peers                  # the tests: seven STS sets; Cranfield, CISI, NPL
    python -m benchmarks.static_peers --development    # the development sets
    python -m benchmarks.static_peers --tables         # smaller rows, and rows for words, in place of the peers

Needs `model2vec` with its extra `distill`, but not for `--tables`. The states of the fit's texts and of the tests are
those of `benchmarks.reproduction.exits`, and are computed if it has not run.

`--tables`: "8 bits" has one scale per row. "8 bits, one scale" has one for the whole table, as model2vec's
`quantize_to`, and so has "7 bits, one scale", as onnxruntime's `quantize_dynamic`. "N words" has a row for each of the
N most frequent words of the fit's texts that are several tokens, beside those of the tokens; a text is the mean over
its words. The features of a word are its embedding as a text of its own and the mean input embedding of its tokens.
"same map" has the rows that the map of the table gives these features, "refitted" those of a new fit to the texts in
words.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks._measure import RESULTS, about, seconds_in_turn
from benchmarks.reproduction import exits
from benchmarks.reproduction.embedding import FOLDER, MAX_LENGTH
from benchmarks.reproduction.fit_texts import sources
from benchmarks.reproduction.study import main_score
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.convert import converted
from m3bert.commands.sources import data_folder, default_base
from m3bert.data.packing import Frame
from m3bert.evaluation import Retrieval
from m3bert.evaluation.evaluators import Evaluator
from m3bert.evaluation.hybrid import CANDIDATES, FUSIONS, Ranking, bm25_search, fuse_scores
from m3bert.evaluation.metrics import ranking_scores
from m3bert.evaluation.search import nearest
from m3bert.exits.maps import CommonSpace, ExitMaps
from m3bert.exits.raw_states import RawStates
from m3bert.exits.sums import FEATURES, TARGET, ExitSums
from m3bert.exits.token_features import TokenFeatures, token_embeddings
from m3bert.utils.numerics import quantize_rows


DIM, QUERIES = 384, 50
WEIGHTS = (0.25, 0.5, 1.0)  # of BM25
WORDS = (5000, 20000)  # numbers of rows for words, on the development sets
Word = tuple[int, ...]  # the ids of its tokens


def distilled() -> tuple[Any, float]:
    """model2vec's static model of the encoder, and the seconds of its fit."""
    from model2vec.distill import distill

    start = time.perf_counter()
    model = distill(default_base(), pca_dims=DIM)
    return model, time.perf_counter() - start


def score(evaluator: Evaluator, vectors: dict[str, torch.Tensor]) -> float:
    """Main metric of embeddings, in percent."""
    return 100 * main_score(evaluator, vectors)


def search(vectors: dict[str, torch.Tensor]) -> Ranking:
    """The best documents of each query by cosine."""
    return Ranking(*nearest(vectors["queries"], vectors["documents"], CANDIDATES))


def retrieval_rows(evaluator: Retrieval, systems: dict[str, dict[str, torch.Tensor]]) -> dict[str, float]:
    """System -> nDCG@10 in percent, of every system alone and with BM25 beside it."""
    words = bm25_search(evaluator.texts["queries"], evaluator.texts["documents"])

    def ndcg(rows: Any) -> float:
        return 100 * ranking_scores(rows, evaluator.relevant)[evaluator.main_metric]

    rows = {"BM25": ndcg(words.rows[:, :10])}
    for system, vectors in systems.items():
        ranking = search(vectors)
        rows[system] = ndcg(ranking.rows[:, :10])
        for fusion, fuse in FUSIONS.items():
            rows[f"{system} + BM25, by {fusion}"] = ndcg(fuse(ranking, words, 10))
        for weight in WEIGHTS:
            rows[f"{system} + {weight} BM25"] = ndcg(fuse_scores(ranking, words, 10, weight))
    return rows


def latencies(static: Any, tokenizer: Any, peer: Any, full: Any, queries: list[str]) -> dict[str, float]:
    """System -> milliseconds to embed one query, tokenising included: medians, timed in turn in one run."""

    def by_table(query: str) -> None:
        inputs = tokenizer([query], truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        static.static_states(inputs.input_ids, inputs.attention_mask)

    def by_encoder(query: str) -> None:
        full(**tokenizer([query], truncation=True, max_length=MAX_LENGTH, return_tensors="pt"))

    systems = {"static table": by_table, "model2vec": lambda query: peer.encode([query]), "full depth": by_encoder}

    def every(embed: Any) -> Any:
        return lambda: [embed(query) for query in queries]

    with torch.no_grad():
        seconds = seconds_in_turn({name: every(embed) for name, embed in systems.items()}, rounds=10)
    return {name: 1000 * value / len(queries) for name, value in seconds.items()}


def measure(data: Path, development: bool) -> dict[str, Any]:
    """Everything that the results file holds, but for what identifies the run."""
    tests = exits.evaluators(data, development)
    raw = exits.raw_states(data, "development" if development else "tests")
    start = time.perf_counter()
    model, tokenizer = exits.fit(data, layers=[0])
    seconds = {"static table": time.perf_counter() - start}
    seconds["encoding the texts"] = torch.load(FOLDER / "texts.pt")["seconds"]
    peer, seconds["model2vec"] = distilled()
    states = exits.after_exits(model, tokenizer, tests, raw)
    scores: dict[str, dict[str, float]] = {}
    for test, evaluator in tests.items():
        texts = {name: list(rows) for name, rows in evaluator.texts.items()}
        sides = {
            "static table": {name: layers[0] for name, layers in states[test].items()},
            "model2vec": {name: torch.from_numpy(peer.encode(rows)).float() for name, rows in texts.items()},
            "full depth": {name: layers[exits.DEPTH] for name, layers in states[test].items()},
        }
        if isinstance(evaluator, Retrieval):
            documents = sides["full depth"]["documents"]
            across = {"queries": sides["static table"]["queries"], "documents": documents}
            scores[test] = retrieval_rows(evaluator, {**sides, "static queries, full documents": across})
        else:
            scores[test] = {system: score(evaluator, vectors) for system, vectors in sides.items()}
        print(test, {name: round(value, 1) for name, value in scores[test].items()}, flush=True)
    queries = [text for test in tests.values() if isinstance(test, Retrieval) for text in test.texts["queries"]][
        :QUERIES
    ]
    size = {
        "static table": 2 * model.get_parameter("elastic.table.weight").numel(),
        "model2vec": peer.embedding.nbytes,
    }
    return {
        "scores": {test: {name: round(value, 2) for name, value in values.items()} for test, values in scores.items()},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "bytes": size,
        "milliseconds_per_query": {
            name: round(value, 4) for name, value in latencies(model, tokenizer, peer, model, queries).items()
        },
    }


def words_of(tokenizer: Any, texts: Iterable[str]) -> list[list[Word]]:
    """The words of texts, truncated as the encoder truncates them."""
    words = []
    for encoding in tokenizer(list(texts), truncation=True, max_length=MAX_LENGTH).encodings:
        pairs = [pair for pair in zip(encoding.word_ids, encoding.ids, strict=True) if pair[0] is not None]
        words.append([tuple(token for _, token in group) for _, group in groupby(pairs, key=lambda pair: pair[0])])
    return words


@dataclass(frozen=True)
class Table:
    """Rows of tokens and words `(rows, width)`, their size, and the row of each word that has one."""

    rows: torch.Tensor
    megabytes: float
    words: Mapping[Word, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: torch.Tensor, words: Mapping[Word, int] | None = None) -> Table:
        """A table in float32."""
        return cls(rows, rows.nbytes / 1e6, words or {})

    def embed(self, texts: Sequence[Sequence[Word]]) -> torch.Tensor:
        """The mean rows of texts, `(texts, width)`."""
        return TokenFeatures([self.rows], torch.zeros(len(self.rows)), []).means(in_rows(texts, self.words))[:, :DIM]


def in_rows(texts: Sequence[Sequence[Word]], words: Mapping[Word, int]) -> list[list[int]]:
    """The rows of texts: one for a word that has one, else those of its tokens."""
    return [list(chain(*((words[word],) if word in words else word for word in text))) for text in texts]


def with_one_scale(rows: torch.Tensor, scale: torch.Tensor) -> Table:
    """A table of whole numbers, one byte each, times one scale."""
    return Table((rows / scale).round() * scale, rows.numel() / 1e6)


def with_row_scales(rows: torch.Tensor) -> Table:
    """A table of 8 bits with one scale per row."""
    whole, scales = quantize_rows(rows)
    return Table(whole * scales[:, None], (whole.nbytes + scales.nbytes) / 1e6)


class WordTables:
    """Fits of tables to the texts of `fit_texts.sources`, with rows for at most `most` frequent words."""

    def __init__(self, data: Path, most: int) -> None:
        self.model, self.tokenizer = converted(default_base())
        self.ignored = self.tokenizer.all_special_ids
        states, texts = exits.raw_states(data, "texts"), sources(data)
        self.texts = list(chain(*texts.values()))
        self.targets = torch.nn.functional.normalize(torch.cat([states[name][exits.DEPTH] for name in texts]))
        self.read = words_of(self.tokenizer, self.texts)
        counts = Counter(word for text in self.read for word in text if len(word) > 1)
        self.frequent = [word for word, _ in counts.most_common(most)]
        raw = RawStates(self.model.eval(), self.tokenizer, "mean", batch_size=64)
        tokens = token_embeddings(raw, ignored=self.ignored)
        self.vectors = [tokens, self.model.get_input_embeddings().weight.detach()]
        if self.frequent:
            frame, inputs = Frame.of(self.tokenizer), self.vectors[1]
            framed = [[*frame.begin, *word, *frame.end] for word in self.frequent]
            shallow = torch.stack([inputs[[*word]].mean(dim=0) for word in self.frequent])
            deep = raw.pooled(framed, [exits.DEPTH])[exits.DEPTH]
            self.vectors = [torch.cat([tokens, deep]), torch.cat([inputs, shallow])]
        self.vocabulary = len(tokens)

    def words(self, count: int) -> dict[Word, int]:
        """The most frequent words -> their rows."""
        return {word: self.vocabulary + row for row, word in enumerate(self.frequent[:count])}

    def features(self, count: int, ids: Iterable[Sequence[int]]) -> TokenFeatures:
        """The features of tokens and words, which are as frequent as in these texts."""
        size = min(self.vocabulary + count, len(self.vectors[0]))
        counts = torch.bincount(torch.tensor(list(chain(*ids))), minlength=size).double()
        counts[self.ignored] = 0
        vectors = [each[:size] for each in self.vectors]
        return TokenFeatures(vectors, (counts[:size] / counts.sum()).float(), self.ignored)

    def fit(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of tokens and words, and their map from the features."""
        ids = in_rows(self.read, self.words(count))
        features = self.features(count, ids)
        sums = ExitSums({TARGET: DIM, FEATURES: features.width}, len(self.texts))
        for start in range(0, len(self.texts), 1024):
            part = slice(start, start + 1024)
            sums.add(self.texts[part], {TARGET: self.targets[part].double(), FEATURES: features.means(ids[part])})
        fit = ExitMaps.of(sums, CommonSpace.of(sums, "last_layer", self.model.config.hidden_size)).table
        assert fit is not None
        print(f"{count} words:", fit.report, flush=True)
        return features.table(fit.affine), fit.affine

    def mapped(self, count: int, affine: torch.Tensor) -> torch.Tensor:
        """The rows of words that the map of a table without words gives, after those of the table."""
        alone, together = (in_rows(self.read, words) for words in ({}, self.words(count)))
        tokens = self.features(0, alone).table(affine)
        words = self.features(count, (*alone, *([row for row in ids if row >= self.vocabulary] for ids in together)))
        return torch.cat([tokens, words.table(affine)[self.vocabulary :]])


@torch.no_grad()
def measure_tables(data: Path, development: bool) -> dict[str, Any]:
    """Test -> table -> score of both sides by the table and, of retrieval, of queries only; and the tables' sizes."""
    fits = WordTables(data, max(WORDS) if development else 0)
    rows, affine = fits.fit(0)
    tables = {"float32": Table.of(rows), "8 bits": with_row_scales(rows)}
    tables["8 bits, one scale"] = with_one_scale(rows, rows.abs().max() / 127)
    tables["7 bits, one scale"] = with_one_scale(rows, (rows.max() - rows.min()) / 127)
    for count in WORDS if development else ():
        words = fits.words(count)
        tables[f"{count} words, same map"] = Table.of(fits.mapped(count, affine), words)
        tables[f"{count} words, refitted"] = Table.of(fits.fit(count)[0], words)
    raw = exits.raw_states(data, "development" if development else "retrieval")
    scores: dict[str, dict[str, float]] = {}
    for test, evaluator in exits.evaluators(data, development).items():
        read = {name: words_of(fits.tokenizer, texts) for name, texts in evaluator.texts.items()}
        full = {name: states[exits.DEPTH] for name, states in raw[test].items()} if test in raw else {}
        scores[test] = {"full depth": score(evaluator, full)} if full else {}
        for name, table in tables.items():
            vectors = {side: table.embed(texts) for side, texts in read.items()}
            scores[test][name] = score(evaluator, vectors)
            if isinstance(evaluator, Retrieval):
                across = scores.setdefault(f"{test} asymmetric", {})
                across[name] = score(evaluator, {**full, "queries": vectors["queries"]})
        print(test, scores[test], scores.get(f"{test} asymmetric"), flush=True)
    return {
        "scores": {test: {name: round(value, 2) for name, value in values.items()} for test, values in scores.items()},
        "megabytes": {name: round(table.megabytes, 1) for name, table in tables.items()},
        "rows_per_text": {
            name: round(mean(map(len, in_rows(fits.read, table.words))), 1) for name, table in tables.items()
        },
    }


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--development", action="store_true", help="score the development sets")
    parser.add_argument("--tables", action="store_true", help="compare smaller rows, and rows for words")
    options = parser.parse_args(arguments)
    measured = (measure_tables if options.tables else measure)(data_folder(), options.development)
    chosen = [name for name in ("tables", "development") if getattr(options, name)]
    described = {
        "command": " ".join(["python -m benchmarks.static_peers", *(f"--{name}" for name in chosen)]),
        "metric": "percent: Spearman correlation (STS), nDCG@10 (retrieval); test -> system",
        **about(packages=("model2vec",)),
    }
    file = RESULTS / f"{'_'.join(['static_peers', *chosen])}.json"
    file.write_text(json.dumps({**described, **measured}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
