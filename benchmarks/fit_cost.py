"""
A fit of exits and paths of deep pre-norm encoders: in forward passes of the same texts.

    python -m benchmarks.fit_cost              # ten minutes
    python -m benchmarks.fit_cost --quick      # width 64, 150 texts

The encoders are random, with the layers of ModernBERT-base (22) and Qwen3-0.6B (28) at width 256. The fit is that of
`fit_exits` with its default paths, without a static table, whose cost is a pass over the vocabulary and does not
depend on the texts. Texts are docstrings of Python's standard library. Up to 2,500 texts, all are read again to refit
the layers before a gap, so that longer lists of texts cost fewer passes. The pass is the whole encoder in the same
batches. Both are timed in turn. The last line printed is a JSON object.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoTokenizer

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most
from m3bert.commands.command import run_command
from m3bert.commands.sources import default_base
from m3bert.data.stdlib_docs import stdlib_pairs
from m3bert.encode.batch import PassCost
from m3bert.encode.padded_batches import padded_chunks
from m3bert.exits.fit import fit_exits
from m3bert.exits.layer_lists import default_depths


BOUNDS: Bounds = {
    "modernbert_passes": at_most(8),
    "modernbert_seconds_per_1000_tokens": None,
    "qwen3_passes": at_most(8),
    "qwen3_seconds_per_1000_tokens": None,
}
HEAD, MAX_LENGTH = 64, 64
FULL, QUICK = (256, 400), (64, 150)  # width, texts
# Model type -> its layers, the width of its feed-forward network in hidden sizes, and its other settings.
ENCODERS: dict[str, tuple[int, float, dict[str, Any]]] = {
    "modernbert": (22, 1.5, {}),
    "qwen3": (28, 3, {"head_dim": HEAD}),
}


def random_encoder(kind: str, width: int, tokenizer: Any) -> Any:
    """An encoder of random weights with the layers of a real one."""
    layers, ratio, settings = ENCODERS[kind]
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep")}
    special |= {"bos_token_id": special["cls_token_id"], "eos_token_id": special["sep_token_id"]}
    heads = {"num_attention_heads": width // HEAD, "num_key_value_heads": max(1, width // HEAD // 2)}
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": int(ratio * width)}
    torch.manual_seed(SEED)
    config = CONFIG_MAPPING[kind](vocab_size=len(tokenizer), **sizes, **heads, **special, **settings)
    return AutoModel.from_config(config).eval()


def figures(run: Run) -> dict[str, float]:
    width, count = QUICK if run.quick else FULL
    tokenizer = AutoTokenizer.from_pretrained(default_base())
    pairs = stdlib_pairs()
    texts = [pair.body for pair in pairs[:: len(pairs) // count]][:count]
    ids = tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    tokens, found = sum(map(len, ids)), {}
    for kind in ENCODERS:
        plain, fitted = (random_encoder(kind, width, tokenizer) for _ in range(2))

        @torch.no_grad()
        def one_pass(model: Any = plain) -> None:
            for _, inputs in padded_chunks(tokenizer, ids, PassCost.on(model.device)):
                model(**inputs)

        def fit(model: Any = fitted) -> None:
            depths = default_depths(model.config.num_hidden_layers)
            fit_exits(model, tokenizer, texts, depths=depths, static=False, max_length=MAX_LENGTH)

        seconds = run.time(f"{kind}, {tokens:,} tokens", {"one pass": one_pass, "fit": fit}, 1)
        found[f"{kind}_passes"] = seconds["fit"] / seconds["one pass"]
        found[f"{kind}_seconds_per_1000_tokens"] = 1000 * seconds["fit"] / tokens
    return found


BENCHMARK = Benchmark("fit_cost", __doc__, BOUNDS, figures)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
