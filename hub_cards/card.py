"""A model card, generated from what is known: the checkpoint, its training record, its evaluation."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..encode.granularity import Granularity, Grid
from ..encode.precisions import FLOAT, PRECISIONS, bytes_per_vector
from ..evaluation.results import GridResults, Latency
from ..modeling.configuration_elastic import legal_dims, legal_layers
from ..models.settings import EmbeddingSettings
from ..utils import papers
from .checkpoint import Checkpoint, sha256_of
from .choices import ENOUGH, Headline
from .costs import CODES_SHOWN, costs, depth_table, dim_table, tokens_counted
from .figures import LEADS
from .metadata import Statements, with_edits
from .native_export import SERVED, SERVED_TYPES, is_plain
from .onnx_graphs import GraphReport, graph_table
from .scores import evaluations
from .sections import generated, join, merge, parse
from .tables import TITLES, dataset_of, markdown, render, title_of
from .training_record import TrainingRecord


PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
ROLES = {"query": "a query", "document": "a document"}
TRUST = ", trust_remote_code=True"


@dataclass(frozen=True)
class CardSource:
    """
    Everything a card is generated from.

    Args:
        repo_id (`str`): The repository, `user/model`.
        checkpoint ([`Checkpoint`]): The checkpoint in its published form.
        results ([`GridResults`], *optional*): Its evaluation.
        statements ([`Statements`], *optional*): What only a person knows.
        figures (`dict[str, str]`): Path of a figure in the repository -> its title.
        onnx ([`GraphReport`], *optional*): The ONNX graphs in the repository.
        cut (`str`, *optional*): For a model taken from a larger checkpoint: `"4x64 of 12x768"`.
        branches (`Sequence[str]`): Branches of the repository that hold one size each.
    """

    repo_id: str
    checkpoint: Checkpoint
    results: GridResults | None = None
    statements: Statements = field(default_factory=Statements)
    figures: Mapping[str, str] = field(default_factory=dict)
    onnx: GraphReport | None = None
    cut: str | None = None
    branches: Sequence[str] = ()

    @property
    def base_model(self) -> str | None:
        """Hub id of the base model; `None` if unknown."""
        record = self.checkpoint.record
        recorded = record.base_model if record else None
        exported = (self.checkpoint.exported_from or {}).get("converted_from")
        return self.statements.base_model or recorded or self.checkpoint.source or exported

    @property
    def embeds(self) -> bool:
        """Whether the model embeds texts: it has no other head."""
        return self.checkpoint.head == "AutoModel"

    @property
    def small(self) -> Granularity | None:
        """A granularity well below the full one; `None` if there is no other."""
        grid, full = self.checkpoint.grid, self.checkpoint.full
        layer = grid.layers[len(grid.layers) // 2] if len(grid.layers) > 2 else grid.layers[0]
        dims = grid.dims_of(layer)
        small = Granularity(layer, dims[(len(dims) - 1) // 2])
        return small if small != full else None

    @property
    def shown(self) -> Grid:
        """The granularities whose costs are shown."""
        return Grid(tuple({*self.checkpoint.grid, *(self.results.granularities.sizes if self.results else ())}))

    @property
    def latency(self) -> Latency | None:
        return self.results.latency if self.results else None

    @cached_property
    def headline(self) -> Headline | None:
        return Headline.of(self.results)

    @property
    def query_layer(self) -> int | None:
        """The depth of the queries in the examples: the advised one, or else the one nearest to a third of all layers;
        `None` without an exit below the last layer."""
        below, headline = self.checkpoint.query_layers, self.headline
        advised = headline.advised if headline is not None and headline.asymmetric else None
        if advised is not None and advised.granularity.layer in below:
            return advised.granularity.layer
        third = self.checkpoint.full.layer / 3
        return min(below, key=lambda depth: (abs(depth - third), depth), default=None)


def render_card(source: CardSource, previous: str | None = None) -> ModelCard:
    """
    The card of a checkpoint. Rendering it twice gives the same card. Edits of an existing card are kept: sections that
    a person changed, text between sections, and metadata.

    Args:
        source ([`CardSource`]): What the card is generated from.
        previous (`str`, *optional*): The existing card.

    Returns:
        [`~huggingface_hub.ModelCard`]

    Raises:
        ValueError: if the metadata of the existing card cannot be read.
    """
    return merged_card("template.md", source.repo_id, variables(source), metadata(source), source.results, previous)


def merged_card(
    template: str,
    repo_id: str,
    values: Mapping[str, Any],
    described: dict[str, Any],
    results: GridResults | None = None,
    previous: str | None = None,
) -> ModelCard:
    """A card from a template with these variables and metadata, merged with an existing one; see [`render_card`]. The
    template finds this module under `card`."""
    name = repo_id.split("/")[-1]
    sections = generated(render(template, card=sys.modules[__name__], name=name, repo=repo_id, **values))
    given = {key: value for key, value in described.items() if value}
    if results is not None and (scores := evaluations(results)):
        given |= {"model_name": name, "eval_results": scores}
    data = ModelCardData(**given)
    if previous is not None:
        try:
            old = ModelCard(previous)
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError("The metadata of the existing card is not valid YAML: fix it first.") from error
        sections = merge(sections, parse(old.text))
        data = ModelCardData(**with_edits(data.to_dict(), old.data.to_dict()))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{join(sections)}")


def datasets_of(record: TrainingRecord | None, said: Statements) -> list[str]:
    return list(dict.fromkeys([*(record.datasets if record else ()), *said.datasets]))


def described(record: TrainingRecord | None, said: Statements, head: str, tags: list[str]) -> dict[str, Any]:
    """The metadata that all cards have. `tags` are generated ones besides those of the training."""
    trained = [*record.tags, "generated_from_trainer"] if record else []
    similar = head == "AutoModel" and "sentence-similarity" in trained
    return {
        "language": list(said.languages),
        "license": said.license,
        "pipeline_tag": "sentence-similarity" if similar else PIPELINES[head],
        # Whether it is a matryoshka is for the caller to say: an objective may train one size.
        "tags": list(dict.fromkeys([*(tag for tag in trained if tag != "matryoshka"), *tags, *said.tags])),
        "datasets": datasets_of(record, said),
    }


def metadata(source: CardSource) -> dict[str, Any]:
    """The metadata of the card by the keys of the Hub, without results."""
    checkpoint, kind = source.checkpoint, source.checkpoint.config.model_type
    conditions = {
        kind: True,
        "sentence-transformers": source.embeds,
        "feature-extraction": source.embeds,
        "matryoshka": checkpoint.trained,
        SERVED: source.embeds and checkpoint.exported_from is not None and kind in SERVED_TYPES,
        "onnx": source.onnx is not None,
    }
    tags = [tag for tag, holds in conditions.items() if holds]
    return described(checkpoint.record, source.statements, checkpoint.head, tags) | {
        "library_name": "sentence-transformers" if source.embeds else "transformers",
        "base_model": source.base_model,
    }


def variables(source: CardSource) -> dict[str, Any]:
    checkpoint, results, small = source.checkpoint, source.results, source.small
    projected, fit = checkpoint.projection is not None, checkpoint.depths.fit or {}
    file = checkpoint.folder / "model.safetensors"
    compared = not checkpoint.is_m3bert and file.is_file() and "source_sha256" in fit
    cited = [papers.M3BERT] if checkpoint.elastic or checkpoint.exported_from is not None else []
    cited += [papers.QAMA] if checkpoint.quantizer_config is not None else []
    length = checkpoint.record.settings.get("max_length") if checkpoint.record else None
    loaded = small if checkpoint.elastic or (source.embeds and checkpoint.trained) else None
    return {
        **training_variables(checkpoint.record, source.statements, checkpoint.settings, *cited),
        **{"source": source, "checkpoint": checkpoint, "results": results, "latency": source.latency},
        **{"full": checkpoint.full, "small": loaded, "shown": small or checkpoint.full, "projected": projected},
        **{"below": checkpoint.query_layers, "native": checkpoint.exported_from, "origin": origin(source)},
        "fit": fit if "fingerprint" in fit else None,  # else it says at most where the depths are from
        "length": length if length and length < checkpoint.max_length else None,
        "by_size": checkpoint.elastic and (not projected or bool(checkpoint.query_layers)),
        "trust": TRUST if checkpoint.elastic else "",
        "full_trust": TRUST if checkpoint.needs_code else "",
        "enough": ENOUGH,
        "tokens": tokens_counted(checkpoint.config),
        "parameters": costs(checkpoint.config, [checkpoint.full])[checkpoint.full].parameters,
        "graphs": graph_table(source.onnx) if source.onnx else "",
        "depth_table": depth_table(checkpoint.config, source.shown, source.latency),
        "dim_table": dim_table(source.shown, source.latency),
        "digest": sha256_of(file) if compared else None,
        "same": compared and checkpoint.has_weights_of_source,
        "legal": legal_values(checkpoint),
        "datasets_of_tasks": {task: dataset_of(results, task) for task in results.tasks()} if results else {},
        "lead": next((file for name in LEADS for file in source.figures if file.endswith(f"{name}.png")), None),
    }


def training_variables(
    record: TrainingRecord | None, said: Statements, settings: EmbeddingSettings, *cited: papers.Paper
) -> dict[str, Any]:
    """The variables that all cards have, with papers to cite besides those of the training."""
    datasets, used = datasets_of(record, said), settings.used_prompts
    links = [f"the data set {link(name, 'datasets/')}" for name in datasets]
    recorded = [paper["citation"] for part in (record.parts if record else ()) for paper in part["papers"]]
    return {
        "record": record,
        "datasets": datasets,
        "sources": [*links, *(f"the local file `{name}`" for name in (record.files if record else ()))],
        "citations": list(dict.fromkeys([*(paper.citation for paper in cited), *recorded])),
        "pooling": settings.pooling,
        "prompts": ", ".join(f"`{text}` before {ROLES.get(role, 'other texts')}" for role, text in used.items()),
    }


# --- Words, lists and tables of the template ----------------------------------------------------------------------


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
