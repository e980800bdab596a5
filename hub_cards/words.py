"""Words, lists and small tables that the templates of cards call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..encode.granularity import Grid
from ..encode.precisions import FLOAT, PRECISIONS, bytes_per_vector
from ..modeling.configuration_elastic import legal_dims, legal_layers
from .card_source import CardSource
from .checkpoint import Checkpoint
from .costs import CODES_SHOWN
from .native_export import is_plain
from .tables import TITLES, markdown, title_of


PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}


def in_words(values: Sequence[int]) -> str:
    """Ascending numbers in words: `0 to 6`, `2 and 4`, `0, 2 and 4`."""
    if len(values) > 2 and [*values] == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last


def depths(values: Sequence[int]) -> str:
    """Depths in words: `depth 2`, `depths 2 and 4`."""
    return f"depth{'s' if len(values) > 1 else ''} {in_words(values)}"


def listed(names: Iterable[str] | Mapping[str, int]) -> str:
    """Names as code: `a`, `b`; with numbers of rows: `a` 1,000, `b` 24."""
    if isinstance(names, Mapping):
        return ", ".join(f"`{name}` {rows:,}" for name, rows in names.items())
    return ", ".join(f"`{name}`" for name in names)


def link(repo_id: str, kind: str = "") -> str:
    """A link to a repository on the Hub; `kind` is `datasets/` for data."""
    return f"[{repo_id}](https://huggingface.co/{kind}{repo_id})"


def origin(source: CardSource) -> str:
    """The base model in words; empty if unknown."""
    base, config = source.base_model, source.checkpoint.config
    if base is None:
        return ""
    if layers := getattr(config, "source_layers", None):
        return f"layers {', '.join(map(str, layers))} of {link(base)}"
    converted = getattr(config, "converted_from", None) == base
    return link(base) + (", converted to m3BERT with equal hidden states at every layer" if converted else "")


def depth_option(checkpoint: Checkpoint, layer: int) -> str:
    """The argument of `SentenceTransformer` that loads a depth; empty for the full one."""
    name, key = ("model", "output_layer") if checkpoint.elastic else ("config", "num_hidden_layers")
    return f', {name}_kwargs={{"{key}": {layer}}}' if layer != checkpoint.full.layer else ""


def export_commands(source: CardSource) -> str:
    """One command per export of an elastic embedding model that needs no remote code; empty for other models."""
    checkpoint, full, layer = source.checkpoint, source.checkpoint.full, source.query_layer
    if not checkpoint.elastic or not source.embeds or checkpoint.quantized:
        return ""
    native, table = is_plain(checkpoint, full.layer), 0 in checkpoint.depths.table
    queries = "" if table else f" --granularity {layer}x{full.dim}"
    possible = [
        (native, f"native --output_dir native  # all {full.layer} layers"),
        (table, "static --output_dir static  # the table look-up"),
        (native and layer is not None, f"router{queries} --output_dir router  # fewer layers for queries"),
    ]
    parts = [part for holds, part in possible if holds] or ["onnx --output_dir onnx  # for onnxruntime"]
    return "\n".join(f"m3bert export --model_name_or_path {source.repo_id} --format {part}" for part in parts)


def exit_table(checkpoint: Checkpoint) -> str:
    """One row per fitted exit: penalty, held-out R^2, and mean cosine to the target. The map that a native export has
    in place of an exit that reads the static table has a second row."""
    fit, rows = checkpoint.depths.fit or {}, []
    for depth in map(str, checkpoint.depths.exits):
        for name, fits in ((depth, fit["layers"]), (f"{depth}, native export", fit.get("state_only", {}))):
            if (one := fits.get(depth)) is not None:  # the basis of the last layer is no fit
                rows.append([name, f"{one['penalty']:.2g}", f"{one['r_squared']:.3f}", f"{one['cosine']:.3f}"])
    return markdown(["depth", "penalty", "held-out R\u00b2", "mean cosine"], rows)


def precision_table(dim: int) -> str:
    """One row per precision of a quantizer: what is stored, and bytes per vector."""
    codes = [code for code in PRECISIONS.values() if code.learned or code.name == FLOAT]
    rows = [[f"`{code.name}`", code.words, str(bytes_per_vector(code.name, dim))] for code in codes]
    return markdown(["code", "what is stored", "bytes per vector"], rows, words=2)


def legal_values(checkpoint: Checkpoint) -> str:
    """The legal layers and dims of a model that was trained at several sizes; empty for others."""
    if not checkpoint.elastic or not checkpoint.trained or checkpoint.projection is not None:
        return ""
    layers = [layer for layer in legal_layers(checkpoint.config) if layer <= checkpoint.full.layer]
    dims = [dim for dim in legal_dims(checkpoint.config) if dim <= checkpoint.full.dim]
    return f"Legal values: `output_layer` {in_words(layers)}; `output_dim` {in_words(dims)}."


def unmeasured(source: CardSource) -> str:
    """A list of what nobody measured."""
    checkpoint, results = source.checkpoint, source.results
    measured = results.granularities if results else Grid((checkpoint.full,))
    scored = {title_of(name).removesuffix(" (MTEB)") for name in (results.task_types() if results else ())}
    types = [title for name, title in TITLES.items() if name != "geometry" and title not in scored]
    sizes = [str(g) for g in checkpoint.grid if g not in [*measured]]
    codes = [code for code in CODES_SHOWN if code not in measured.codes]
    learned = any(PRECISIONS[code].learned for code in measured.codes)
    items = {
        "quality, at any granularity": not results,
        f"quality in {', '.join(types)}": results and types,
        f"the granularities {', '.join(sizes)}": results and sizes,
        "languages other than those of the tasks above": results,
        "how near the training data is to the texts of the tasks": results and checkpoint.record,
        f"quality of vectors in {' or '.join(codes)}, although their bytes are listed": codes,
        "quality of the codes of its quantizer": checkpoint.quantizer_config and not learned,
        "speed": source.latency is None,
        "bias, and harm that its use may cause": True,
    }
    return "\n".join(f"- {item}" for item, holds in items.items() if holds)
