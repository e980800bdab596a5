"""A model card, generated from what is known: the checkpoint, its training record, its evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..encode.granularity import Granularity, Grid
from ..encode.precisions import PRECISIONS, bytes_per_vector
from ..evaluation.results import GridResults
from ..modeling.configuration_elastic import legal_dims, legal_layers
from ..utils import papers
from . import tables
from .checkpoint import Checkpoint, sha256_of
from .choices import ENOUGH, Headline
from .costs import CODES_SHOWN, costs, tokens_counted
from .figures import LEADS
from .metadata import Statements, evaluations, kept
from .native_export import SERVED, SERVED_TYPES, is_plain
from .onnx_graphs import GraphReport, graph_table
from .sections import generated, join, merge, parse
from .tables import TITLES, dataset_of, markdown, title_of
from .training_record import TrainingRecord


PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
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
    """

    repo_id: str
    checkpoint: Checkpoint
    results: GridResults | None = None
    statements: Statements = field(default_factory=Statements)
    figures: Mapping[str, str] = field(default_factory=dict)
    onnx: GraphReport | None = None
    cut: str | None = None

    @property
    def base_model(self) -> str | None:
        """Hub id of the base model; `None` if unknown."""
        record = self.checkpoint.record
        recorded = record.base_model if record else None
        exported = (self.checkpoint.exported_from or {}).get("converted_from")
        return self.statements.base_model or recorded or self.checkpoint.source or exported

    @property
    def small(self) -> Granularity | None:
        """A granularity well below the full one, for the examples; `None` if there is no other."""
        grid, full = self.checkpoint.grid, self.checkpoint.full
        layer = grid.layers[len(grid.layers) // 2] if len(grid.layers) > 2 else grid.layers[0]
        dims = grid.dims_of(layer)
        small = Granularity(layer, dims[(len(dims) - 1) // 2])
        return small if small != full else None


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
    return merged_card("template.md", source.repo_id, context(source), metadata(source), source.results, previous)


def merged_card(
    template: str,
    repo_id: str,
    values: Mapping[str, Any],
    described: dict[str, Any],
    results: GridResults | None = None,
    previous: str | None = None,
) -> ModelCard:
    """A card from a template with these variables and metadata, merged with an existing one; see [`render_card`]."""
    name = repo_id.split("/")[-1]
    known = {"name": name, "repo": repo_id, "in_words": in_words, "qama": papers.QAMA}
    known |= {"all_codes": PRECISIONS.values(), "bytes_per_vector": bytes_per_vector}
    sections = generated(tables.render(template, **known, **values))
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
        data = ModelCardData(**kept(data.to_dict(), old.data.to_dict()))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{join(sections)}")


def datasets_of(record: TrainingRecord | None, said: Statements) -> list[str]:
    """Hub ids of the training data."""
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
    checkpoint = source.checkpoint
    embeds, kind = checkpoint.head == "AutoModel", checkpoint.config.model_type
    conditions = {
        kind: True,
        "sentence-transformers": embeds,
        "feature-extraction": embeds,
        "matryoshka": checkpoint.trained,
        SERVED: embeds and checkpoint.exported_from is not None and kind in SERVED_TYPES,
        "onnx": source.onnx is not None,
    }
    tags = [tag for tag, holds in conditions.items() if holds]
    return described(checkpoint.record, source.statements, checkpoint.head, tags) | {
        "library_name": "sentence-transformers" if embeds else "transformers",
        "base_model": source.base_model,
    }


def training_values(record: TrainingRecord | None, said: Statements, *cited: papers.Paper) -> dict[str, Any]:
    """The variables of the sections on training and citation, with papers to cite besides those of the training."""
    recorded = [paper["citation"] for part in (record.parts if record else ()) for paper in part["papers"]]
    return {
        "record": record,
        "datasets": datasets_of(record, said),
        "citations": list(dict.fromkeys([*(paper.citation for paper in cited), *recorded])),
    }


def origin(source: CardSource) -> str | None:
    """The base model in words; `None` if unknown."""
    base, config = source.base_model, source.checkpoint.config
    if base is None:
        return None
    link = f"[{base}](https://huggingface.co/{base})"
    if layers := getattr(config, "source_layers", None):
        return f"layers {', '.join(map(str, layers))} of {link}"
    converted = getattr(config, "converted_from", None) == base
    return f"{link}, converted to m3BERT with equal hidden states at every layer" if converted else link


def query_layer(checkpoint: Checkpoint, headline: Headline | None) -> int | None:
    """The depth of the queries in the examples: the advised one, or else the one nearest to a third of all layers;
    `None` without an exit below the last layer."""
    below = checkpoint.query_layers
    advised = headline.advised if headline is not None and headline.asymmetric else None
    if advised is not None and advised.granularity.layer in below:
        return advised.granularity.layer
    third = checkpoint.full.layer / 3
    return min(below, key=lambda depth: (abs(depth - third), depth), default=None)


def exit_values(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The template's variables about fitted depths; `None` if the checkpoint has none."""
    spec, below = checkpoint.depths, checkpoint.query_layers
    if not spec.aligned:
        return None
    fit = spec.fit if spec.fit and "fingerprint" in spec.fit else None  # else it only says where the depths are from
    file = checkpoint.folder / "model.safetensors"
    compared = not checkpoint.is_m3bert and file.is_file() and "source_sha256" in (spec.fit or {})
    layers = {depth: checkpoint.source_layers(depth) for depth in spec.aligned}
    exact = fit and (fit["target"], fit["basis"]) == ("last layer", "last_layer")
    return {
        "below": below,
        "exits": [depth for depth in spec.exits if depth > 0],
        "joint": [depth for depth in spec.table if depth > 0],
        "paths": {depth: ran for depth, ran in layers.items() if ran != [*range(1, depth + 1)]},
        "fit": fit,
        "table": exit_table(checkpoint) if fit and fit["layers"] else None,
        "index_stays_valid": bool(exact and checkpoint.fitted and below and checkpoint.source),
        "weights_digest": sha256_of(file) if compared else None,
    }


def plain_exports(checkpoint: Checkpoint, query_layer: int | None) -> list[tuple[str, str, str]]:
    """What `m3bert export` can make of an elastic embedding model that runs without remote code: format, further
    options, and what it is. `query_layer` embeds the queries of a router if there is no static table."""
    full, has_table = checkpoint.full, 0 in checkpoint.depths.table
    if not checkpoint.elastic or checkpoint.head != "AutoModel" or checkpoint.quantized:
        return []
    native = is_plain(checkpoint, full.layer)
    size = "" if has_table else f" --granularity {query_layer}x{full.dim}"
    found = [
        (native, ("native", "", f"all {full.layer} layers")),
        (has_table, ("static", "", "the table look-up")),
        (native and query_layer is not None, ("router", size, "fewer layers for queries")),
    ]
    return [export for possible, export in found if possible] or [("onnx", "", "for onnxruntime")]


def exit_table(checkpoint: Checkpoint) -> str:
    """One row per fitted exit: penalty, held-out R^2, and mean cosine to the target. The map that a native export has
    in place of an exit that reads the static table has a row of its own."""
    fit, rows = checkpoint.depths.fit or {}, []
    for depth in map(str, checkpoint.depths.exits):
        for name, fits in ((depth, fit["layers"]), (f"{depth}, native export", fit.get("state_only", {}))):
            if (one := fits.get(depth)) is not None:  # the basis of the last layer is no fit
                rows.append([name, f"{one['penalty']:.2g}", f"{one['r_squared']:.3f}", f"{one['cosine']:.3f}"])
    return markdown(["depth", "penalty", "held-out R\u00b2", "mean cosine"], rows)


def in_words(values: Sequence[int]) -> str:
    """Ascending numbers in words: `0 to 6`, `2 and 4`, `0, 2 and 4`."""
    if len(values) > 2 and [*values] == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last


def context(source: CardSource) -> dict[str, Any]:
    """The variables of the template."""
    checkpoint, results, full, small = source.checkpoint, source.results, source.checkpoint.full, source.small
    config, record, said = checkpoint.config, checkpoint.record, source.statements
    embeds, projected = checkpoint.head == "AutoModel", checkpoint.projection is not None
    legal = checkpoint.elastic and checkpoint.trained and not projected
    cited = [papers.M3BERT] if checkpoint.elastic or checkpoint.exported_from is not None else []
    cited += [papers.QAMA] if checkpoint.quantizer_config is not None else []
    loaded = small if checkpoint.elastic or (embeds and checkpoint.trained) else None
    # A native encoder is cut by its config.
    cut = loaded is not None and not checkpoint.elastic and loaded.layer < full.layer
    scored = {title_of(name).removesuffix(" (MTEB)") for name in (results.task_types() if results else ())}
    measured = results.granularities if results else Grid((full,))
    tasks = {task: dataset_of(results, task) for task in results.tasks()} if results else {}
    trained_on = datasets_of(record, said)
    shown = Grid(tuple({*checkpoint.grid, *(measured.sizes if results else ())}))
    headline = Headline.of(results)
    queried = query_layer(checkpoint, headline)
    return {
        **training_values(record, said, *cited),
        **{"checkpoint": checkpoint, "config": config, "head": checkpoint.head, "embeds": embeds, "results": results},
        **{"projected": projected, "native": checkpoint.exported_from, "quantizer": checkpoint.quantizer_config},
        **{"full": full, "small": loaded, "shown": small or full, "left_out": cut},
        **{"cut": source.cut, "figures": source.figures, "onnx": source.onnx, "elastic_repo": said.base_model},
        **{"pooling": checkpoint.settings.pooling, "max_length": checkpoint.max_length},
        "pipeline": PIPELINES[checkpoint.head],
        "elastic": checkpoint.elastic and (not projected or bool(checkpoint.query_layers)),
        "parameters": costs(config, [full])[full].parameters,
        "trust": TRUST if checkpoint.elastic else "",
        "full_trust": TRUST if checkpoint.needs_code else "",
        "exits": exit_values(checkpoint),
        "query_layer": queried,
        "plain_exports": plain_exports(checkpoint, queried),
        "headline": headline,
        "enough": ENOUGH,
        "lead": next((file for name in LEADS for file in source.figures if file.endswith(f"{name}.png")), None),
        "graphs": graph_table(source.onnx) if source.onnx else None,
        "costs": costs(config, [Granularity(layer, shown.dims_of(layer)[-1]) for layer in shown.layers]),
        "dims": shown.dims,
        "tokens": tokens_counted(config),
        "codes": [PRECISIONS[name] for name in CODES_SHOWN],
        "origin": origin(source),
        "legal_layers": [layer for layer in legal_layers(config) if layer <= full.layer] if legal else [],
        "legal_dims": [dim for dim in legal_dims(config) if dim <= full.dim] if legal else [],
        "trained_on": {task: dataset for task, dataset in tasks.items() if dataset in trained_on},
        "unscored_types": [title for kind, title in TITLES.items() if kind != "geometry" and title not in scored],
        "unscored": [str(g) for g in checkpoint.grid if g not in [*measured]] if results else [],
        "unscored_codes": [code for code in CODES_SHOWN if code not in measured.codes],
        "learned_scored": any(PRECISIONS[code].learned for code in measured.codes),
    }
