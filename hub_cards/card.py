"""A model card, generated from what is known: the checkpoint, its training record, its evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..evaluation.results import GridResults
from ..models.settings import EmbeddingSettings
from ..utils import papers
from ..utils.hashing import sha256_of
from . import words
from .card_source import CardSource
from .choices import ENOUGH
from .costs import costs, depth_table, dim_table, tokens_counted
from .figures import LEADS
from .metadata import Statements, with_edits
from .native_export import SERVED, SERVED_TYPES
from .onnx_graphs import graph_table
from .scores import evaluations
from .sections import generated, join, merge, parse
from .tables import dataset_of, render
from .training_record import TrainingRecord


ROLES = {"query": "a query", "document": "a document"}
TRUST = ", trust_remote_code=True"


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
    template finds [`words`] under this name."""
    name = repo_id.split("/")[-1]
    sections = generated(render(template, words=words, papers=papers, name=name, repo=repo_id, **values))
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
        "pipeline_tag": "sentence-similarity" if similar else words.PIPELINES[head],
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
        **{"below": checkpoint.query_layers, "native": checkpoint.exported_from, "origin": words.origin(source)},
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
        "legal": words.legal_values(checkpoint),
        "datasets_of_tasks": {task: dataset_of(results, task) for task in results.tasks()} if results else {},
        "lead": next((file for name in LEADS for file in source.figures if file.endswith(f"{name}.png")), None),
    }


def training_variables(
    record: TrainingRecord | None, said: Statements, settings: EmbeddingSettings, *cited: papers.Paper
) -> dict[str, Any]:
    """The variables that all cards have, with papers to cite besides those of the training."""
    datasets, used = datasets_of(record, said), settings.used_prompts
    links = [f"the data set {words.link(name, 'datasets/')}" for name in datasets]
    recorded = [paper["citation"] for part in (record.parts if record else ()) for paper in part["papers"]]
    return {
        "record": record,
        "datasets": datasets,
        "sources": [*links, *(f"the local file `{name}`" for name in (record.files if record else ()))],
        "citations": list(dict.fromkeys([*(paper.citation for paper in cited), *recorded])),
        "pooling": settings.pooling,
        "prompts": ", ".join(f"`{text}` before {ROLES.get(role, 'other texts')}" for role, text in used.items()),
    }
