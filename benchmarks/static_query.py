"""
One query at depth 0, a look-up in the static table: through this project's encoder, as the exported `StaticEmbedding`,
and as one that sentence-transformers makes itself from the same table. And one at two layers, beside a plain model of
two layers.

    python -m benchmarks.static_query              # a minute on two cores
    python -m benchmarks.static_query --quick      # fewer rounds

Encoder: all-MiniLM-L6-v2 (extras `quickstart`, `sentence-transformers`) as an elastic repository, with a random table
of 384 dims and random exits; times do not depend on their values. Queries of 4 to 12 words, one per call, tokenising
included. What is compared is called in turn, and times are 10th percentiles, because other work on the machine only
adds time. `tokenizer` is the fast tokenizer alone. `encoder_milliseconds` is `GridEncoder.encode` of the whole encoder
at `0x384`; `export_vs_library` is the time of the exported folder over that of sentence-transformers' own.
`two_layers_vs_native` is the time of a path of two layers over that of a `BertModel` of two layers; with
`two_layers_with_table_vs_native`, its exit reads the table, too. The last line printed is a JSON object.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most
from m3bert.commands.command import run_command
from m3bert.commands.sources import default_base
from m3bert.evaluation.latency import milliseconds_in_turn
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.static_export import export_static
from m3bert.modeling.modeling_elastic import make_elastic
from m3bert.models.auto import load_model
from m3bert.models.repository import write_repository
from m3bert.trainers import Grid


BOUNDS: Bounds = {
    "encoder_milliseconds": at_most(0.3),
    "export_vs_library": at_most(1.1),
    "two_layers_vs_native": at_most(1.02),
    "two_layers_with_table_vs_native": None,
}
QUERIES, ROUNDS, LAYER_ROUNDS, QUICK = 200, 4000, 1000, 200


def elastic(folder: Path, *, joint: bool = False) -> Checkpoint:
    """The encoder with a random static table and a path of two layers, whose exit reads the table if `joint`."""
    model = make_elastic(AutoModel.from_pretrained(default_base()))
    tokenizer = AutoTokenizer.from_pretrained(default_base())
    draw, width = torch.Generator().manual_seed(SEED), model.config.hidden_size
    model.set_depths(
        exits={2: (torch.randn(width, width, generator=draw), torch.zeros(width))},
        joints={2: (torch.randn(width, 2 * width, generator=draw), torch.zeros(width))} if joint else {},
        paths={2: ([1, model.config.num_hidden_layers], {})},
        table=torch.randn(model.config.vocab_size, width, generator=draw),
        ignored_ids=sorted(set(tokenizer.all_special_ids)),
        fit={},
    )
    folder.mkdir()
    write_repository(model, folder)
    return Checkpoint(folder)


def measure(run: Run) -> dict[str, float]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    draw = random.Random(SEED)
    with TemporaryDirectory() as folder:
        checkpoint = elastic(Path(folder, "model"))
        export_static(checkpoint, Path(folder, "static"))
        encoder = checkpoint.encoder(Grid.parse(f"0x{checkpoint.full.dim}"))
        exported = SentenceTransformer(str(Path(folder, "static")), device="cpu")
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)  # of its own, as the export has
        both = {"path": checkpoint, "path, with table": elastic(Path(folder, "joint"), joint=True)}
        short = {name: load_model(each.folder, AutoModel, output_layer=2).eval() for name, each in both.items()}
        config = AutoConfig.from_pretrained(default_base(), num_hidden_layers=2)
        short["native"] = AutoModel.from_config(config).eval()
    embedding = StaticEmbedding(tokenizer, embedding_weights=encoder.model.elastic.table.weight.detach().clone())
    # This encoder normalises, so both sides do.
    library = SentenceTransformer(modules=[embedding, Normalize()], device="cpu")
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
    layers = {
        name: lambda texts, model=model: model(**checkpoint.tokenizer(texts, return_tensors="pt"))
        for name, model in short.items()
    }
    times: dict[str, float] = {}
    # A library finds the processor's caches full of its own code after itself only, so each has its turns apart.
    for case, engines, rounds in (
        ("one query, m3bert", ours, ROUNDS),
        ("one query, sentence-transformers", theirs, ROUNDS),
        ("one query, two layers", layers, LAYER_ROUNDS),
    ):
        functions = {name: one_query(encode) for name, encode in engines.items()}
        with torch.inference_mode():
            milliseconds = milliseconds_in_turn(functions, QUICK if run.quick else rounds)
        times |= run.record(case, milliseconds, "milliseconds")
    return {
        "encoder_milliseconds": times["encoder"],
        "export_vs_library": times["export"] / times["library"],
        "two_layers_vs_native": times["path"] / times["native"],
        "two_layers_with_table_vs_native": times["path, with table"] / times["native"],
    }


BENCHMARK = Benchmark("static_query", __doc__, BOUNDS, measure, packages=("sentence-transformers", "tokenizers"))


if __name__ == "__main__":
    run_command(BENCHMARK.main)
