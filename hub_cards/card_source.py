"""Everything that the card of a checkpoint is generated from, and what its template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from ..encode.granularity import Granularity, Grid
from ..evaluation.results import GridResults
from ..models.settings import EmbeddingSettings
from ..utils import papers
from ..utils.hashing import sha256_of
from .checkpoint import PIPELINES, Checkpoint
from .figures import LEADS
from .metadata import Statements
from .native_export import SERVED, SERVED_TYPES
from .onnx_graphs import GraphReport
from .sizes import Headline
from .tables import dataset_of
from .training_record import TrainingRecord


TRUST = ", trust_remote_code=True"


@dataclass(frozen=True)
class Training:
    """What is known of the training of a model: its record, and what a person says."""

    record: TrainingRecord | None
    said: Statements

    @property
    def datasets(self) -> list[str]:
        """Hub ids of the training data."""
        return list(dict.fromkeys([*(self.record.datasets if self.record else ()), *self.said.datasets]))

    @property
    def max_length(self) -> int | None:
        """Longest text of the training in tokens, if it is on record."""
        return self.record.settings.get("max_length") if self.record else None

    def citations(self, *more: papers.Paper) -> list[str]:
        """BibTeX entries of `more` papers, and of those of the training."""
        parts = self.record.parts if self.record else ()
        recorded = [paper["citation"] for part in parts for paper in part["papers"]]
        return list(dict.fromkeys([*(paper.citation for paper in more), *recorded]))

    def metadata(self, head: str, tags: Sequence[str]) -> dict[str, Any]:
        """The metadata that all cards have. `tags` are generated ones besides those of the training."""
        trained = [*self.record.tags, "generated_from_trainer"] if self.record else []
        similar = head == "AutoModel" and "sentence-similarity" in trained
        return {
            "language": list(self.said.languages),
            "license": self.said.license,
            "pipeline_tag": "sentence-similarity" if similar else PIPELINES[head],
            # Whether it is a matryoshka is for the caller to say: an objective may train one size.
            "tags": list(dict.fromkeys([*(tag for tag in trained if tag != "matryoshka"), *tags, *self.said.tags])),
            "datasets": self.datasets,
        }


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

    template: ClassVar[str] = "card.md"

    repo_id: str
    checkpoint: Checkpoint
    results: GridResults | None = None
    statements: Statements = field(default_factory=Statements)
    figures: Mapping[str, str] = field(default_factory=dict)
    onnx: GraphReport | None = None
    cut: str | None = None
    branches: Sequence[str] = ()

    @property
    def training(self) -> Training:
        return Training(self.checkpoint.record, self.statements)

    @property
    def settings(self) -> EmbeddingSettings:
        return self.checkpoint.settings

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
        grid = self.checkpoint.grid
        layer = grid.layers[len(grid.layers) // 2] if len(grid.layers) > 2 else grid.layers[0]
        dims = grid.dims_of(layer)
        small = Granularity(layer, dims[(len(dims) - 1) // 2])
        return small if small != self.checkpoint.full else None

    @property
    def example(self) -> Granularity | None:
        """The smaller granularity that the examples load; `None` if they load the full size."""
        loads = self.checkpoint.elastic or (self.embeds and self.checkpoint.trained)
        return self.small if loads else None

    @property
    def loads_sizes(self) -> bool:
        """Whether `output_layer` loads fewer layers."""
        checkpoint = self.checkpoint
        return checkpoint.elastic and (checkpoint.projection is None or bool(checkpoint.query_layers))

    @property
    def sizes(self) -> Grid:
        """The granularities whose costs are shown."""
        return Grid(tuple({*self.checkpoint.grid, *(self.results.granularities.sizes if self.results else ())}))

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

    @property
    def trust(self) -> str:
        """The argument that runs the code of the repository, if sizes below the full one need it."""
        return TRUST if self.checkpoint.elastic else ""

    @property
    def full_trust(self) -> str:
        """The same for the full size."""
        return TRUST if self.checkpoint.needs_code else ""

    @cached_property
    def headline(self) -> Headline | None:
        return Headline.of(self.results)

    @property
    def lead(self) -> str | None:
        """The figure at the top, if one was drawn."""
        return next((file for name in LEADS for file in self.figures if file.endswith(f"{name}.png")), None)

    @property
    def fit(self) -> Mapping[str, Any] | None:
        """The record of the fit of the exits; `None` if it says at most where they are from."""
        fit = self.checkpoint.depths.fit or {}
        return fit if "fingerprint" in fit else None

    @property
    def keeps_vectors(self) -> bool:
        """Whether vectors from the original encoder remain valid: the fit left the full size as it was."""
        fit, checkpoint = self.fit or {}, self.checkpoint
        unchanged = fit.get("target") == "last layer" and fit.get("basis") == "last_layer"
        return unchanged and checkpoint.fitted and bool(checkpoint.query_layers) and checkpoint.source is not None

    @cached_property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights of an encoder that was made elastic, where that of its source is on record."""
        file = self.checkpoint.folder / "model.safetensors"
        compared = "source_sha256" in (self.checkpoint.depths.fit or {}) and not self.checkpoint.is_m3bert
        return sha256_of(file) if compared and file.is_file() else None

    @property
    def task_datasets(self) -> dict[str, str | None]:
        """Task of the evaluation -> its data on the Hub, or your own."""
        return {task: dataset_of(self.results, task) for task in self.results.tasks()} if self.results else {}

    @property
    def citations(self) -> list[str]:
        """BibTeX entries of the architecture and of the training."""
        checkpoint = self.checkpoint
        cited = [papers.M3BERT] if checkpoint.elastic or checkpoint.exported_from is not None else []
        return self.training.citations(*cited, *([papers.QAMA] if checkpoint.quantizer_config is not None else []))

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the card by the keys of the Hub, without results."""
        checkpoint, kind = self.checkpoint, self.checkpoint.config.model_type
        conditions = {
            kind: True,
            "sentence-transformers": self.embeds,
            "feature-extraction": self.embeds,
            "matryoshka": checkpoint.trained,
            SERVED: self.embeds and checkpoint.exported_from is not None and kind in SERVED_TYPES,
            "onnx": self.onnx is not None,
        }
        library = "sentence-transformers" if self.embeds else "transformers"
        metadata = self.training.metadata(checkpoint.head, [tag for tag, holds in conditions.items() if holds])
        return metadata | {"library_name": library, "base_model": self.base_model}
