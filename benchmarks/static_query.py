"""
One query at layer 0, a look-up in the static table: through this project's encoder, as the exported `StaticEmbedding`,
and as one that sentence-transformers makes itself from the same table.

    python -m benchmarks.static_query              # a minute on two cores
    python -m benchmarks.static_query --quick      # fewer rounds

Encoder: all-MiniLM-L6-v2 (extras `quickstart`, `sentence-transformers`) with a random table of 384 dims in float32;
times do not depend on its values. Queries of 4 to 12 words, one per call, tokenising included. What is compared is
called in turn, and times are 10th percentiles, because other work on the machine only adds time. `tokenizer` is the
fast tokenizer alone. `encoder_milliseconds` is `GridEncoder.encode` of the whole encoder at `0x384`;
`export_vs_library` is the time of the exported folder over that of sentence-transformers' own. The last line printed
is a JSON object.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoTokenizer

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most
from hub_cards.checkpoint import Checkpoint
from hub_cards.static_export import export_static
from modeling_m3bert import M3BertModel
from scripts.command import run_command
from scripts.convert import convert
from scripts.sources import default_base
from trainers import Grid
from trainers.evaluation.latency import milliseconds_in_turn


BOUNDS: Bounds = {"encoder_milliseconds": at_most(0.3), "export_vs_library": at_most(1.1)}
QUERIES, ROUNDS, QUICK = 200, 4000, 200


def with_table(folder: Path) -> Checkpoint:
    """The encoder with a random static table, saved in a folder."""
    convert(default_base(), str(folder))
    model, tokenizer = M3BertModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    table = torch.randn(
        model.config.vocab_size, model.config.hidden_size, generator=torch.Generator().manual_seed(SEED)
    )
    model.set_exits({}, static_table=table, static_ignored_ids=sorted(set(tokenizer.all_special_ids)))
    model.save_pretrained(folder)
    return Checkpoint(folder)


def measure(run: Run) -> dict[str, float]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    draw = random.Random(SEED)
    with TemporaryDirectory() as folder:
        checkpoint = with_table(Path(folder, "model"))
        export_static(checkpoint, Path(folder, "static"))
        encoder = checkpoint.encoder(Grid.parse(f"0x{checkpoint.full.dim}"))
        exported = SentenceTransformer(str(Path(folder, "static")), device="cpu")
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)  # of its own, as the export has
    own = StaticEmbedding(tokenizer, embedding_weights=encoder.model.static_table.weight.detach().clone())
    # This encoder normalises, so both sides do.
    library = SentenceTransformer(modules=[own, Normalize()], device="cpu")
    words = sorted(word for word in checkpoint.tokenizer.get_vocab() if word.isalpha())
    queries = [" ".join(draw.choices(words, k=draw.randint(4, 12))) for _ in range(QUERIES)]

    def one_query(encode: Callable[[list[str]], object]) -> Callable[[], object]:
        turn = cycle(queries)
        return lambda: encode([next(turn)])

    ours = {"tokenizer": checkpoint.tokenizer, "encoder": encoder.encode}
    theirs = {
        "export": lambda texts: exported.encode(texts, show_progress_bar=False),
        "library": lambda texts: library.encode(texts, show_progress_bar=False),
    }
    times: dict[str, float] = {}
    # A library finds the processor's caches full of its own code after itself only, so each has its turns apart.
    for case, engines in (("one query, m3bert", ours), ("one query, sentence-transformers", theirs)):
        functions = {name: one_query(encode) for name, encode in engines.items()}
        found = milliseconds_in_turn(functions, QUICK if run.quick else ROUNDS)
        times |= run.record(case, found, "milliseconds")
    return {"encoder_milliseconds": times["encoder"], "export_vs_library": times["export"] / times["library"]}


BENCHMARK = Benchmark("static_query", __doc__, BOUNDS, measure, packages=("sentence-transformers", "tokenizers"))


if __name__ == "__main__":
    run_command(BENCHMARK.main)
