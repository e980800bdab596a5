"""Sentences, lists and small tables that the templates of cards call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..encode.granularity import Grid
from ..encode.precisions import FLOAT, PRECISIONS, bytes_per_vector
from ..evaluation.results import NOT_JUDGED
from ..modeling.configuration_elastic import legal_dims, legal_layers
from ..models.settings import EmbeddingSettings
from .card_source import CardSource, Training
from .checkpoint import PIPELINES, Checkpoint
from .native_export import is_plain
from .sizes import CODES_SHOWN, ENOUGH, Headline, costs
from .tables import TITLES, markdown, share, title_of


# The templates also read PIPELINES, PRECISIONS and bytes_per_vector from here.


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


def origin(card: CardSource) -> str:
    """The base model in words; empty if unknown."""
    base, config = card.base_model, card.checkpoint.config
    if base is None:
        return ""
    if layers := getattr(config, "source_layers", None):
        return f"layers {', '.join(map(str, layers))} of {link(base)}"
    converted = getattr(config, "converted_from", None) == base
    return link(base) + (", converted to m3BERT with equal hidden states at every layer" if converted else "")


def opening(card: CardSource) -> str:
    """The first sentence of a card: what the model is."""
    checkpoint, config, full = card.checkpoint, card.checkpoint.config, card.checkpoint.full
    architecture = "" if checkpoint.is_m3bert else f" ({config.model_type})"
    head = "" if card.embeds else f" with a head for {PIPELINES[checkpoint.head]}"
    return (
        f"{'An elastic' if checkpoint.elastic else 'A'} text encoder{architecture}{head}: {full.layer} layers, hidden "
        f"size {config.hidden_size}, {costs(config, [full])[full].parameters:,} parameters, vectors of {full.dim} "
        f"numbers, and texts of up to {checkpoint.max_length} tokens."
    )


def advice(card: CardSource, headline: Headline) -> str:
    """Which size to load, and what it keeps of the full one; empty if there is only one size."""
    best, full, metric = headline.advised, headline.full, headline.metric
    if best is None:
        others = f"No smaller size keeps {100 * ENOUGH:.0f}% of the {metric} of `{full.granularity}`."
        return others if len(headline.offers) > 1 else ""
    layer = best.granularity.layer
    size = f"`{best.granularity}`{'' if layer else ' (table look-up)'}"
    mixed = headline.asymmetric and layer < card.checkpoint.full.layer
    sides = " for queries, and all layers for documents" if mixed else ""
    quality = f"{share(best.quality, full.quality)}% of the {metric} of `{full.granularity}`"
    time = f", in {share(best.ms, full.ms)}% of the time" if best.ms < full.ms else ""
    memory = f", with {share(best.bytes, full.bytes)}% of the bytes" if best.bytes < full.bytes else ""
    return f"Load {size}{sides}: it keeps {quality}{time}{memory}."


def sentence_transformer_options(card: CardSource, layer: int, dim: int | None = None) -> str:
    """The arguments of `SentenceTransformer` that load a depth, and keep this number of dims."""
    name, key = ("model", "output_layer") if card.checkpoint.elastic else ("config", "num_hidden_layers")
    depth = f', {name}_kwargs={{"{key}": {layer}}}' if layer != card.checkpoint.full.layer else ""
    return f"{card.trust}{f', truncate_dim={dim}' if dim else ''}{depth}"


def auto_model_options(card: CardSource) -> str:
    """The arguments of `AutoModel` that load the size of the examples."""
    size = card.example
    if size is None:
        return card.full_trust
    if card.checkpoint.elastic:
        return f"{card.trust}, output_layer={size.layer}, output_dim={size.dim}"
    return f", num_hidden_layers={size.layer}" if size.layer < card.checkpoint.full.layer else ""


def prompts(settings: EmbeddingSettings) -> str:
    """What to put before which texts; empty without prompts."""
    roles = {"query": "a query", "document": "a document"}
    used = settings.used_prompts.items()
    before = ", ".join(f"`{text}` before {roles.get(role, 'other texts')}" for role, text in used)
    return f"Put these prompts before your texts: {before}." if used else ""


def export_commands(card: CardSource) -> str:
    """One command per export of an elastic embedding model that needs no remote code; empty for other models."""
    checkpoint, full, layer = card.checkpoint, card.checkpoint.full, card.query_layer
    if not checkpoint.elastic or not card.embeds or checkpoint.quantized:
        return ""
    native, table = is_plain(checkpoint, full.layer), 0 in checkpoint.depths.table
    queries = "" if table else f" --granularity {layer}x{full.dim}"
    possible = [
        (native, f"native --output_dir native  # all {full.layer} layers"),
        (table, "static --output_dir static  # the table look-up"),
        (native and layer is not None, f"router{queries} --output_dir router  # fewer layers for queries"),
    ]
    parts = [part for holds, part in possible if holds] or ["onnx --output_dir onnx  # for onnxruntime"]
    return "\n".join(f"m3bert export --model_name_or_path {card.repo_id} --format {part}" for part in parts)


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


def training_data(training: Training) -> str:
    """Rows, columns and origin of the data of a training on record."""
    record = training.record
    if record is None:
        return ""
    rows = "a stream of rows" if record.rows is None else f"{record.rows:,} rows" if record.rows else "rows"
    sets = f" in {len(record.sets)} sets ({listed(record.sets)})" if record.sets else ""
    columns = f" with the columns {listed(record.columns)}" if record.columns else ""
    sources = [f"the data set {link(name, 'datasets/')}" for name in training.datasets]
    sources += [f"the local file `{name}`" for name in record.files]
    origin = f" of {', '.join(sources)}" if sources else "; their source is not on record"
    return f"{rows}{sets}{columns}{origin}"


def legal_values(checkpoint: Checkpoint) -> str:
    """A list item with the legal layers and dims of a model that was trained at several sizes; empty for others."""
    if not checkpoint.elastic or not checkpoint.trained or checkpoint.projection is not None:
        return ""
    layers = [layer for layer in legal_layers(checkpoint.config) if layer <= checkpoint.full.layer]
    dims = [dim for dim in legal_dims(checkpoint.config) if dim <= checkpoint.full.dim]
    return f"- Legal values: `output_layer` {in_words(layers)}; `output_dim` {in_words(dims)}."


def unmeasured(card: CardSource) -> str:
    """A list of what nobody measured."""
    checkpoint, results = card.checkpoint, card.results
    measured = results.granularities if results else Grid((checkpoint.full,))
    scored = {title_of(name).removesuffix(" (MTEB)") for name in (results.task_types() if results else ())}
    types = [title for name, title in TITLES.items() if name not in NOT_JUDGED and title not in scored]
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
        "speed": not results or results.latency is None,
        "bias, and harm that its use may cause": True,
    }
    return "\n".join(f"- {item}" for item, holds in items.items() if holds)
