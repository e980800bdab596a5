"""A model card, made of what is known: checkpoint, training record, evaluation. Nothing in it is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from jinja2 import Environment, StrictUndefined

from trainers import Granularity, Grid, papers
from trainers.evaluation import GridResults

from .checkpoint import Checkpoint
from .costs import BYTES_A_NUMBER, costs, tokens_counted
from .figures import TITLES
from .metadata import Statements, card_data, kept
from .sections import generated, join, merge, parse
from .tables import family_table, markdown, task_table


TEMPLATE = Path(__file__).with_name("template.md")
PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}
# Those that the library has a pipeline for whose input is one text.
WITH_PIPELINE = ("AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")


@dataclass(frozen=True)
class CardSource:
    """
    What a card is made of.

    Args:
        repo_id (`str`): Where the checkpoint will be, `user/model`.
        checkpoint ([`Checkpoint`]): As it is published.
        results ([`GridResults`], *optional*): Of its evaluation.
        statements ([`Statements`], *optional*): What only a person can say.
        figures (`dict[str, str]`): Path in the repository -> title.
        onnx (`list[str]`): Paths of exported graphs in the repository.
        cut (`str`, *optional*): What it is a part of, where it was cut from a larger checkpoint.
    """

    repo_id: str
    checkpoint: Checkpoint
    results: GridResults | None = None
    statements: Statements = field(default_factory=Statements)
    figures: Mapping[str, str] = field(default_factory=dict)
    onnx: Sequence[str] = ()
    cut: str | None = None

    @property
    def name(self) -> str:
        """Of the model, without its owner."""
        return self.repo_id.split("/")[-1]

    @property
    def base_model(self) -> str | None:
        """Where it comes from, as far as anybody says."""
        record = self.checkpoint.record
        recorded = record.base_model if record else None
        return self.statements.base_model or recorded or getattr(self.checkpoint.config, "converted_from", None)

    @property
    def datasets(self) -> list[str]:
        """Hub ids of the data it was trained on."""
        record = self.checkpoint.record
        return list(dict.fromkeys([*(record.datasets if record else []), *self.statements.datasets]))

    @property
    def small(self) -> Granularity | None:
        """A granularity well below the full one, for examples; `None` where there is no other."""
        grid, full = self.checkpoint.grid, self.checkpoint.full
        layer = grid.layers[len(grid.layers) // 2] if len(grid.layers) > 2 else grid.layers[0]
        dims = grid.dims_of(layer)
        small = Granularity(layer, dims[(len(dims) - 1) // 2])
        return small if small != full else None


def render_card(source: CardSource, previous: str | None = None) -> ModelCard:
    """
    The card of a checkpoint. Rendering it again changes nothing; rendering it over a card that a person has edited
    keeps the sections, the text between them, and the metadata that are theirs.

    Args:
        source ([`CardSource`]): What it is made of.
        previous (`str`, *optional*): The card that is there.

    Returns:
        [`~huggingface_hub.ModelCard`]

    Raises:
        ValueError: if the card that is there has metadata that cannot be read.
    """
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    values = context(source)
    sections = generated(
        TEMPLATE.read_text(encoding="utf-8"), lambda text: environment.from_string(text).render(values)
    )
    data = card_data(metadata(source), source.name, source.results)
    if previous is None:
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{join(sections)}")
    try:
        old = ModelCard(previous)
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError("The metadata of the card that is there cannot be read as YAML: mend it first.") from error
    content = f"---\n{data.to_yaml()}\n---\n\n{join(merge(sections, parse(old.text)))}"
    card = ModelCard(content)
    card.data = type(card.data)(**kept(card.data.to_dict(), old.data.to_dict()))
    return ModelCard(str(card))


def metadata(source: CardSource) -> dict[str, Any]:
    """Keys of the Hub's specification, but for the results."""
    checkpoint, said = source.checkpoint, source.statements
    record = checkpoint.record
    embeds = checkpoint.head == "AutoModel"
    similar = embeds and record is not None and "sentence-similarity" in record.tags
    tags = [checkpoint.config.model_type, *(record.tags if record else [])]
    tags += ["sentence-transformers", "feature-extraction"] if embeds else []
    tags = [tag for tag in tags if tag != "matryoshka"] + (["matryoshka"] if checkpoint.trained else [])
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
    """What the template reads."""
    checkpoint, results, small = source.checkpoint, source.results, source.small
    config, record = checkpoint.config, checkpoint.record
    families = results.judged_families() if results else []
    return {
        "name": source.name,
        "repo": source.repo_id,
        "size": size_of(source),
        "elastic": checkpoint.elastic and checkpoint.projection is None,
        "trained": checkpoint.trained,
        "grid": str(checkpoint.trained_grid),
        "cut": source.cut,
        "quantized": checkpoint.quantized,
        "head": checkpoint.head,
        "projection": checkpoint.projection is not None,
        "pooling": checkpoint.pooling,
        "causal": checkpoint.causal,
        "remote": checkpoint.elastic,
        "trust": ", trust_remote_code=True" if checkpoint.elastic else "",
        "onnx": list(source.onnx),
        "prompts": checkpoint.prompts,
        **usage(checkpoint, small),
        "costs": cost_table(checkpoint, results),
        "tokens": tokens_counted(config),
        "results": results is not None,
        "latency": results.latency if results else None,
        "date": results.date if results else None,
        "machine": results.machine if results else None,
        "seed": results.seed if results else None,
        "versions": ", ".join(f"{k} {v}" for k, v in results.versions.items()) if results else None,
        "max_length": results.settings.get("max_length") if results else None,
        "families": family_table(results) if families and results else None,
        "judged": [(f, results.main_metric(f), ", ".join(results.tasks(f))) for f in families] if results else [],
        "task_tables": (
            [(f, results.main_metric(f), task_table(results, f)) for f in results.families()] if results else []
        ),
        "figures": [(title, file) for file, title in source.figures.items()],
        "record": record,
        "datasets": ", ".join(f"`{name}`" for name in source.datasets),
        "origin": origin(source),
        "settings": (
            markdown(["setting", "value"], ([f"`{k}`", f"`{v}`"] for k, v in record.settings.items()))
            if record
            else None
        ),
        "limits": limits(source),
        "gaps": gaps(source),
        "citations": citations(source),
    }


def size_of(source: CardSource) -> str:
    """What it is, in a sentence."""
    checkpoint = source.checkpoint
    config, full = checkpoint.config, checkpoint.full
    kind = "An elastic text encoder" if checkpoint.elastic else f"A text encoder ({config.model_type})"
    with_head = f", with a head for {PIPELINES[checkpoint.head]}" if checkpoint.head != "AutoModel" else ""
    (cost,) = costs(config, [Granularity(full.layer, full.dim)]).values()
    return (
        f"{kind}{with_head}: {full.layer} layers of width {config.hidden_size}, {cost.parameters:,} parameters, "
        f"vectors of {full.dim} numbers, texts of up to {checkpoint.max_length} tokens."
    )


def usage(checkpoint: Checkpoint, small: Granularity | None) -> dict[str, Any]:
    """The parts of the examples that depend on the checkpoint."""
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


def cost_table(checkpoint: Checkpoint, results: GridResults | None) -> str:
    """A row a granularity: parameters, operations a token, milliseconds where they were measured, bytes a vector."""
    scored = results.granularities if results else ()
    grid = Grid(tuple(dict.fromkeys([*checkpoint.grid, *scored])))
    latency = results.latency if results else None
    header = ["granularity", "parameters", "without tables", "million operations a token"]
    header += ["ms to encode", "ms to search"] if latency else []
    header += [f"bytes, {kind}" for kind in BYTES_A_NUMBER]
    rows = []
    for g, cost in costs(checkpoint.config, grid).items():
        row = [str(g), f"{cost.parameters:,}", f"{cost.layer_parameters:,}", f"{cost.flops_a_token / 1e6:.1f}"]
        if latency:
            times = latency.encode_ms.get(str(g.layer)), latency.search_ms.get(str(g.dim))
            row += ["" if time is None else f"{time:.1f}" for time in times]
        rows.append([*row, *(f"{cost.vector_bytes(kind):g}" for kind in BYTES_A_NUMBER)])
    return markdown(header, rows)


def origin(source: CardSource) -> str:
    """Where the weights come from, in words."""
    base = source.base_model
    converted = getattr(source.checkpoint.config, "converted_from", None)
    if base is None:
        return "weights whose origin has no name on the Hub"
    link = f"[{base}](https://huggingface.co/{base})"
    return f"{link}, converted to m3BERT with equal states at every layer" if converted == base else link


def limits(source: CardSource) -> list[str]:
    """What does not work, or not as well."""
    checkpoint, results, full = source.checkpoint, source.results, source.checkpoint.full
    found = [f"Texts beyond {checkpoint.max_length} tokens are cut."]
    trained_length = checkpoint.record.settings.get("max_length") if checkpoint.record else None
    if trained_length is not None and trained_length < checkpoint.max_length:
        found.append(f"It was trained on texts of up to {trained_length} tokens.")
    if checkpoint.projection is None and not checkpoint.trained:
        found.append(
            "No layer but the last and no prefix was trained to be read by itself: expect losses below the full size."
        )
    elif checkpoint.projection is None:
        found.append(f"No other granularities were trained to be read than `{checkpoint.trained_grid}`.")
    if checkpoint.elastic and checkpoint.trained and checkpoint.projection is None:
        layers = ", ".join(str(layer) for layer in checkpoint.config.legal_layers if layer <= full.layer)
        dims = ", ".join(str(dim) for dim in checkpoint.config.legal_dims if dim <= full.dim)
        found.append(f"Legal values: `output_layer` {layers}; `output_dim` {dims}.")
    if checkpoint.projection is not None:
        found.append("The projection belongs to the last layer: `AutoModel` gives the states before it.")
    if checkpoint.quantized:
        found.append("Weights in 8 bits need the package torchao.")
    if results is not None and results.latency is not None:
        found.append("Milliseconds are of one machine: they say how sizes compare rather than what another one does.")
    return found


def gaps(source: CardSource) -> list[str]:
    """What was not measured."""
    results = source.results
    if results is None:
        found = ["quality, at any granularity", "speed"]
    else:
        missing = [title for family, title in TITLES.items() if family not in results.judged_families()]
        unscored = [str(g) for g in source.checkpoint.grid if g not in results.granularities.granularities]
        found = [f"quality in {', '.join(missing)}"] if missing else []
        found += [f"the granularities {', '.join(unscored)}"] if unscored else []
        found += ["speed"] if results.latency is None else []
    found += ["languages other than those of the tasks above"] if results is not None else []
    found.append("quality of vectors in 8 bits or 1 bit, whose bytes are in the table of costs")
    found.append("bias, and harm that its use may do")
    return found


def citations(source: CardSource) -> list[str]:
    """BibTeX entries of the architecture and of the objective."""
    record = source.checkpoint.record
    entries = [papers.M3BERT.citation] if source.checkpoint.elastic else []
    entries += [record.paper["citation"]] if record and record.paper else []
    return list(dict.fromkeys(entries))
