"""A model card, generated from what is known: the checkpoint, its training record, its evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from modeling_m3bert.modeling_elastic import legal_dims, legal_layers
from trainers.core import papers
from trainers.core.codes import CODES, FLOAT
from trainers.core.extras import require_extra
from trainers.core.granularity import Granularity
from trainers.evaluation.results import GridResults
from trainers.hub.training_record import TrainingRecord

from .checkpoint import Checkpoint
from .codes import code_values, quantizer_values
from .costs import codes_shown, cost_table, costs, tokens_counted
from .exits import exit_values, in_words
from .metadata import Statements, card_data, kept
from .native_export import SERVED_TYPES
from .onnx_graphs import GraphReport, graph_table
from .sections import generated, join, merge, parse
from .tables import (
    asymmetric_table,
    digest_table,
    engine_table,
    hybrid_table,
    parts_table,
    settings_table,
    task_table,
    task_type_table,
    tasks_table,
)
from .task_words import TITLES, dataset_of, title_of


TEMPLATE = Path(__file__).with_name("template.md")
PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}
# How the examples turn the states of a model into one vector per text.
POOLING_CODE = {
    "mean": """
    real = inputs["attention_mask"].unsqueeze(-1)
    vectors = (states * real).sum(dim=1) / real.sum(dim=1)
""",
    "lasttoken": """
    last = inputs["attention_mask"].cumsum(dim=1).argmax(dim=1)  # the last token of each text
    vectors = states[torch.arange(len(states)), last]
""",
    "cls": """
    first = inputs["attention_mask"].argmax(dim=1)  # the first token of each text
    vectors = states[torch.arange(len(states)), first]
""",
}
TRUST = ", trust_remote_code=True"
# Heads with a pipeline in transformers that takes one text.
WITH_PIPELINE = ("AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")


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
    def name(self) -> str:
        """The name of the model, without its owner."""
        return self.repo_id.split("/")[-1]

    @property
    def base_model(self) -> str | None:
        """Hub id of the base model; `None` if unknown."""
        record = self.checkpoint.record
        recorded = record.base_model if record else None
        exported = (self.checkpoint.exported_from or {}).get("converted_from")
        return self.statements.base_model or recorded or self.checkpoint.source or exported

    @property
    def datasets(self) -> list[str]:
        """Hub ids of the training data."""
        record = self.checkpoint.record
        return list(dict.fromkeys([*(record.datasets if record else []), *self.statements.datasets]))

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
        ValueError: if the metadata of the existing card cannot be read, or the extra `publish` is missing.
    """
    template = TEMPLATE.read_text(encoding="utf-8")
    return merged_card(template, context(source), metadata(source), source.name, source.results, previous)


def merged_card(
    template: str,
    values: Mapping[str, Any],
    described: dict[str, Any],
    name: str,
    results: GridResults | None = None,
    previous: str | None = None,
) -> ModelCard:
    """
    A card from a template, merged with an existing one; see [`render_card`].

    Args:
        template (`str`): The sections of the card, in Jinja.
        values (`Mapping[str, Any]`): The variables of the template.
        described (`dict[str, Any]`): Metadata by the keys of the Hub.
        name (`str`): Name of the model in the results.
        results ([`GridResults`], *optional*): Results for the metadata.
        previous (`str`, *optional*): The existing card.
    """
    jinja2 = require_extra("jinja2", "publish", "A model card")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    sections = generated(template, lambda text: environment.from_string(text).render(values))
    data = card_data(described, name, results)
    if previous is None:
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{join(sections)}")
    try:
        old = ModelCard(previous)
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError("The metadata of the existing card is not valid YAML: fix it first.") from error
    content = f"---\n{data.to_yaml()}\n---\n\n{join(merge(sections, parse(old.text)))}"
    card = ModelCard(content)
    card.data = type(card.data)(**kept(card.data.to_dict(), old.data.to_dict()))
    return ModelCard(str(card))


def metadata(source: CardSource) -> dict[str, Any]:
    """The metadata of the card by the keys of the Hub, without results."""
    checkpoint, said = source.checkpoint, source.statements
    record = checkpoint.record
    embeds = checkpoint.head == "AutoModel"
    similar = embeds and record is not None and "sentence-similarity" in record.tags
    tags = [checkpoint.config.model_type, *(record.tags if record else [])]
    tags += ["sentence-transformers", "feature-extraction"] if embeds else []
    tags = [tag for tag in tags if tag != "matryoshka"] + (["matryoshka"] if checkpoint.trained else [])
    served = checkpoint.exported_from is not None and checkpoint.config.model_type in SERVED_TYPES
    tags += ["text-embeddings-inference"] if embeds and served else []
    tags += ["onnx"] if source.onnx else []
    tags += ["generated_from_trainer"] if record else []
    return {
        "language": list(said.languages),
        "license": said.license,
        "library_name": "sentence-transformers" if embeds else "transformers",
        "pipeline_tag": "sentence-similarity" if similar else PIPELINES[checkpoint.head],
        "tags": list(dict.fromkeys([*tags, *said.tags])),
        "base_model": source.base_model,
        "datasets": source.datasets,
    }


def context(source: CardSource) -> dict[str, Any]:
    """The variables of the template."""
    checkpoint, results, small = source.checkpoint, source.results, source.small
    config, record, quantizing = checkpoint.config, checkpoint.record, checkpoint.quantizer_record
    task_types = results.judged_task_types() if results else []
    return {
        "name": source.name,
        "repo": source.repo_id,
        "size": size_of(source),
        "elastic": checkpoint.elastic and (checkpoint.projection is None or bool(checkpoint.query_layers)),
        "cuts_dims": checkpoint.projection is None,
        "trained": checkpoint.trained,
        "grid": str(checkpoint.trained_grid),
        "fitted": checkpoint.fitted,
        "exits": exit_values(checkpoint),
        "asymmetric": asymmetric_values(results) if results and results.asymmetric_searches else None,
        "hybrid": hybrid_values(results) if results and results.hybrid_searches else None,
        "example_words": meaning_of(small or checkpoint.full),
        "cut": source.cut,
        "native": checkpoint.exported_from,
        "architecture": (config.architectures or [config.model_type])[0],
        "elastic_repo": source.statements.base_model,
        "quantized": checkpoint.quantized,
        "head": checkpoint.head,
        "projection": checkpoint.projection is not None,
        "pooling": checkpoint.pooling,
        "pooling_code": POOLING_CODE[checkpoint.pooling].strip("\n"),
        "remote": checkpoint.elastic,
        "digests": digest_table(digests) if (digests := checkpoint.code_digests()) else None,
        "trust": TRUST if checkpoint.elastic else "",
        "full_trust": TRUST if checkpoint.needs_code else "",
        "onnx": source.onnx,
        "graphs": graph_table(source.onnx) if source.onnx else None,
        "prompts": checkpoint.prompts,
        **usage(checkpoint, small),
        "quantizer": quantizer_values(checkpoint),
        "quantizer_parts": parts_table(quantizing.parts) if quantizing else None,
        "quantizer_settings": settings_table(quantizing.settings) if quantizing else None,
        "costs": cost_table(checkpoint, results),
        "codes": [CODES[name] for name in codes_shown(results)],
        "tokens": tokens_counted(config),
        "results": results is not None,
        "latency": results.latency if results else None,
        "engines": engine_table(results.latency, results.granularities.layers)
        if results and results.latency
        else None,
        "date": results.date if results else None,
        "machine": results.machine if results else None,
        "seed": results.seed if results else None,
        "versions": ", ".join(f"{k} {v}" for k, v in results.versions.items()) if results else None,
        "max_length": results.settings.get("max_length") if results else None,
        "task_types": task_type_table(results) if task_types and results else None,
        "tasks": tasks_table(results) if results else None,
        "task_tables": (
            [(t, results.main_metric(t), task_table(results, t)) for t in results.task_types()] if results else []
        ),
        **code_values(results),
        "figures": [(title, file) for file, title in source.figures.items()],
        "record": record,
        "parts": parts_table(record.parts) if record else None,
        "several": record is not None and len(record.parts) > 1,
        "data": training_data(record, source.datasets) if record else None,
        "origin": origin(source),
        "settings": settings_table(record.settings) if record else None,
        "limits": limits(source),
        "gaps": gaps(source),
        "citations": citations(source),
        "qama": papers.QAMA,
    }


def size_of(source: CardSource) -> str:
    """The model in one sentence."""
    checkpoint = source.checkpoint
    config, full = checkpoint.config, checkpoint.full
    kind = "An elastic text encoder" if checkpoint.elastic else "A text encoder"
    kind += "" if checkpoint.is_m3bert else f" ({config.model_type})"
    with_head = f" with a head for {PIPELINES[checkpoint.head]}" if checkpoint.head != "AutoModel" else ""
    (cost,) = costs(config, [Granularity(full.layer, full.dim)]).values()
    return (
        f"{kind}{with_head}: {full.layer} layers, hidden size {config.hidden_size}, {cost.parameters:,} parameters, "
        f"vectors of {full.dim} numbers, and texts of up to {checkpoint.max_length} tokens."
    )


def asymmetric_values(results: GridResults) -> dict[str, Any]:
    """The measured searches with queries and documents at different layers, at the widest dim."""
    dim = max(search.dim for search in results.asymmetric_searches)
    return {"dim": dim, "metric": results.main_metric("retrieval"), "table": asymmetric_table(results, dim)}


def hybrid_values(results: GridResults) -> dict[str, Any]:
    """The measured searches with BM25 beside embeddings, at the widest dim."""
    return {"metric": results.main_metric("retrieval"), "table": hybrid_table(results)}


def meaning_of(granularity: Granularity) -> str:
    """What a granularity such as `4x64` means, for readers who see one for the first time."""
    return f"`{granularity}` means: depth {granularity.layer}, keep the first {granularity.dim} numbers."


def usage(checkpoint: Checkpoint, small: Granularity | None) -> dict[str, Any]:
    """The variables of the usage examples."""
    full = checkpoint.full
    options: dict[str, int] = {}
    if small is not None and checkpoint.elastic:
        options = {"output_layer": small.layer, "output_dim": small.dim}
    elif small is not None and small.layer < full.layer:
        options = {"num_hidden_layers": small.layer}
    in_pipeline = checkpoint.head in WITH_PIPELINE
    depth = {name: value for name, value in options.items() if name != "output_dim"}
    taken_by = "model_kwargs" if checkpoint.elastic else "config_kwargs"
    inner = f", {taken_by}={depth}".replace("'", '"') if depth and small and small.layer < full.layer else ""
    return {
        "small": small is not None and (checkpoint.elastic or (checkpoint.head == "AutoModel" and checkpoint.trained)),
        "left_out": bool(depth) and not checkpoint.elastic,
        "small_dim": small.dim if small else None,
        "small_options": ", ".join(f"{name}={value}" for name, value in options.items()),
        "small_dict": str(options).replace("'", '"'),
        "small_st_options": f"truncate_dim={small.dim}{inner}" if small else None,
        "full_words": f"{full.layer} layers, {full.dim} numbers",
        "small_words": f"{small.layer} layers, {small.dim} numbers" if small else None,
        "pipeline": PIPELINES[checkpoint.head] if in_pipeline else None,
        "example": (
            f'"the {checkpoint.tokenizer.mask_token} of the list"'
            if checkpoint.head == "AutoModelForMaskedLM"
            else '"open the file and read a list of names"'
        ),
    }


def training_data(record: TrainingRecord, datasets: Iterable[str]) -> str:
    """The rows of the training data, and where they are from (Hub ids, and files on record), in words."""
    rows = "a stream of rows" if record.rows is None else f"{record.rows:,} rows" if record.rows else "rows"
    if record.sets:
        sets = ", ".join(f"`{name}` {count:,}" for name, count in record.sets.items())
        rows += f" in {len(record.sets)} sets ({sets})"
    columns = f" with the columns {', '.join(f'`{name}`' for name in record.columns)}" if record.columns else ""
    places = [f"the data set [{name}](https://huggingface.co/datasets/{name})" for name in datasets]
    places += [f"the local file `{name}`" for name in record.files]
    return f"{rows}{columns} of {', '.join(places)}" if places else f"{rows}{columns}; their source is not on record"


def link_to(repo_id: str) -> str:
    """A link to a model on the Hub."""
    return f"[{repo_id}](https://huggingface.co/{repo_id})"


def origin(source: CardSource) -> str | None:
    """Where the weights come from, in words; `None` if unknown."""
    base = source.base_model
    converted = getattr(source.checkpoint.config, "converted_from", None)
    if base is None:
        return None
    link = link_to(base)
    if layers := getattr(source.checkpoint.config, "source_layers", None):
        return f"layers {', '.join(map(str, layers))} of {link}"
    return f"{link}, converted to m3BERT with equal hidden states at every layer" if converted == base else link


def limits(source: CardSource) -> list[str]:
    """What the model cannot do, or does less well."""
    checkpoint, results, full = source.checkpoint, source.results, source.checkpoint.full
    found = [f"Texts longer than {checkpoint.max_length} tokens are truncated."]
    trained_length = checkpoint.record.settings.get("max_length") if checkpoint.record else None
    if trained_length is not None and trained_length < checkpoint.max_length:
        found.append(f"It was trained on texts of up to {trained_length} tokens.")
    if checkpoint.fitted:
        found.append("Its exits were fitted without training: expect lower quality with fewer layers.")
    elif checkpoint.projection is None and not checkpoint.trained:
        found.append("Only the full size was trained, as far as is known: expect lower quality at smaller sizes.")
    elif checkpoint.projection is None:
        found.append(f"Only these granularities were trained: `{checkpoint.trained_grid}`.")
    if checkpoint.elastic and checkpoint.trained and checkpoint.projection is None:
        layers = in_words([layer for layer in legal_layers(checkpoint.config) if layer <= full.layer])
        dims = in_words([dim for dim in legal_dims(checkpoint.config) if dim <= full.dim])
        found.append(f"Legal values: `output_layer` {layers}; `output_dim` {dims}.")
    if checkpoint.exported_from and checkpoint.projection is not None:
        found.append("The Dense module after the pooling makes the embedding. `AutoModel` returns what precedes it.")
    elif checkpoint.projection is not None:
        found.append("The projection belongs to the last layer. `AutoModel` returns the hidden states before it.")
    for task in results.tasks() if results is not None else ():
        dataset = dataset_of(results, task) if results is not None else None
        if dataset in source.datasets:
            found.append(f"It was trained on `{dataset}`, where `{task}` is from: expect less on other texts.")
    if checkpoint.quantized:
        found.append("Loading its weights in 8 bits needs the package torchao.")
    if results is not None and results.latency is not None:
        found.append("Times were measured on one machine: they compare sizes, and differ on other machines.")
    return found


def gaps(source: CardSource) -> list[str]:
    """What was not measured."""
    results = source.results
    if results is None:
        found = ["quality, at any granularity", "speed"]
    else:
        scored = {title_of(name).removesuffix(" (MTEB)") for name in (*results.task_types(), "geometry")}
        missing = [title for title in TITLES.values() if title not in scored]
        unscored = [str(g) for g in source.checkpoint.grid if g not in results.granularities.granularities]
        found = [f"quality in {', '.join(missing)}"] if missing else []
        found += [f"the granularities {', '.join(unscored)}"] if unscored else []
        found += ["speed"] if results.latency is None else []
        found += ["languages other than those of the tasks above"]
    measured = results.granularities.codes if results else [FLOAT]
    if results is not None and source.checkpoint.record is not None:
        found.append("how near the training data is to the texts of the tasks")
    unmeasured = [code for code in codes_shown(results) if code not in measured]
    if unmeasured:
        found.append(f"quality of vectors in {' or '.join(unmeasured)}, although their bytes are listed")
    if source.checkpoint.quantizer_config is not None and not any(CODES[code].learned for code in measured):
        found.append("quality of the codes of its quantizer")
    found.append("bias, and harm that its use may cause")
    return found


def citations(source: CardSource) -> list[str]:
    """BibTeX entries of m3BERT, if it is one or elastic, and of every paper behind the training loss."""
    record = source.checkpoint.record
    elastic = source.checkpoint.elastic or source.checkpoint.exported_from is not None
    entries = [papers.M3BERT.citation] if elastic else []
    entries += [papers.QAMA.citation] if source.checkpoint.quantizer_config is not None else []
    return papers_of(record, entries)


def papers_of(record: TrainingRecord | None, entries: Iterable[str] = ()) -> list[str]:
    """These BibTeX entries, and those of the papers of a training loss."""
    parts = record.parts if record is not None else []
    return list(dict.fromkeys([*entries, *(paper["citation"] for part in parts for paper in part["papers"])]))
