"""What all objectives on pooled embeddings share: who is contrasted with whom, their configuration and trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from .arguments import NestedTrainingArguments
from .collators import TextColumnsCollator, fields_of
from .distributed import RankRows
from .embedding_modules import width_of, write_modules
from .granularity import Grid
from .losses import nested_info_nce
from .nested import POOLINGS, Pooling, family_of, unwrap_encoder
from .objective import NestedBatch, Objective
from .projection import Projection
from .teacher import TeacherEmbeddings
from .trainer import NestedTrainer


LARGEST_LEARNED_SCALE = 100.0
NO_TEXT = -1


@dataclass(frozen=True)
class Matches:
    """
    Who belongs to whom in a batch.

    Args:
        rows ([`RankRows`]): How the pairs are spread over ranks.
        targets (`torch.Tensor` of shape `(batch,)`): Row of each anchor's positive among all ranks' positives.
        anchor_ids (`torch.Tensor` of shape `(batch, 2)`, *optional*): Text ids of each anchor's positive and of the
            anchor itself.
        pair_ids (`torch.Tensor` of shape `(pairs of all ranks, 2)`, *optional*): The same of all ranks' pairs.
        candidate_ids (`torch.Tensor` of shape `(candidates of all ranks, 2)`, *optional*): The same of every
            candidate; a hard negative belongs to no anchor.
    """

    rows: RankRows
    targets: torch.Tensor
    anchor_ids: torch.Tensor | None = None
    pair_ids: torch.Tensor | None = None
    candidate_ids: torch.Tensor | None = None


class EmbeddingObjective(Objective):
    """
    Base of objectives that contrast pooled embeddings. The first text column holds the anchors, the second their
    positives; further columns are hard negatives, and negatives of every anchor of the batch, on all ranks.

    Args:
        grid ([`Grid`]): The granularities to train.
        temperature (`float`, *optional*, defaults to 0.05): tau; cosines are divided by it.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, or `"anchor"`.
        symmetric (`bool`, *optional*, defaults to `False`): The mean of two losses: of an anchor among all candidates,
            and of a positive among all anchors.
        mask_duplicates (`bool`, *optional*, defaults to `True`): The text of an anchor's own positive, and the
            positives of an equal anchor, are no negatives of it, wherever they stand in the batch. Which texts are
            equal, `text_ids` say, which [`TextColumnsCollator`] makes; without them nothing is masked.
        learn_temperature (`bool`, *optional*, defaults to `False`): Train tau with the backbone, from `temperature` on
            and not below 0.01, as `log(1 / tau)`.

    Raises:
        ValueError: if an argument is out of range; in forward, for a batch of one pair without hard negatives.
    """

    pooling: Pooling

    def __init__(
        self,
        grid: Grid,
        temperature: float = 0.05,
        pooling: Pooling = "mean",
        symmetric: bool = False,
        mask_duplicates: bool = True,
        learn_temperature: bool = False,
    ):
        super().__init__(grid)
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} must be above 0.")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")
        self.pooling, self.symmetric, self.mask_duplicates = pooling, symmetric, mask_duplicates
        self._temperature = temperature
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature))) if learn_temperature else None

    @property
    def temperature(self) -> float | torch.Tensor:
        """tau as it is now; a learned one is brought back to 0.01 where a step led below it."""
        if self.log_scale is None:
            return self._temperature
        with torch.no_grad():  # clamped in the graph it would have no gradient, and never come back
            self.log_scale.clamp_(max=math.log(LARGEST_LEARNED_SCALE))
        return 1 / self.log_scale.exp()

    def embeddings(self, batch: NestedBatch, layer: int) -> list[torch.Tensor]:
        """Pooled embeddings of each text column at a layer, this rank's, at full width."""
        return [text.pooled(layer, self.pooling) for text in batch.texts.values()]

    def matches(self, batch: NestedBatch) -> Matches:
        """
        Who belongs to whom; the same for every granularity.

        Raises:
            ValueError: if there are not two text columns.
        """
        if len(batch.texts) < 2:
            raise ValueError(f"A contrastive loss needs two text columns or more; got {', '.join(batch.texts)}.")
        first = next(iter(batch.texts.values())).layers[self.layers[0]]
        rows = RankRows.of(len(first), first.device)
        targets = torch.arange(len(first), device=first.device) + rows.offset
        if batch.text_ids is None or not self.mask_duplicates:
            return Matches(rows, targets)
        anchors, positives, *negatives = batch.text_ids.values()
        anchor_ids = torch.stack([positives, anchors], dim=1)
        pair_ids = rows.gather(anchor_ids)
        nobodys = [rows.gather(torch.stack([ids, torch.full_like(ids, NO_TEXT)], dim=1)) for ids in negatives]
        return Matches(rows, targets, anchor_ids, pair_ids, torch.cat([pair_ids, *nobodys]))

    def contrast(self, embeddings: Sequence[torch.Tensor], dims: Sequence[int], matches: Matches) -> torch.Tensor:
        """
        InfoNCE of one layer's embeddings at several dims, with the candidates of all ranks.

        Args:
            embeddings (`Sequence[torch.Tensor]`): One of shape `(batch, hidden_size)` for each text column.
            dims (`Sequence[int]`): Prefix dims, ascending.
            matches ([`Matches`]): Of the batch.

        Returns:
            `torch.Tensor` of shape `(len(dims),)`: means over the batch; see [`RankRows.mean`].
        """
        anchors, *others = (vectors[:, : dims[-1]] for vectors in embeddings)
        losses = nested_info_nce(
            anchors,
            torch.cat([matches.rows.gather(vectors) for vectors in others]),
            dims=dims,
            temperature=self.temperature,
            targets=matches.targets,
            anchor_ids=matches.anchor_ids,
            candidate_ids=matches.candidate_ids,
        )
        if not self.symmetric:
            return matches.rows.mean(losses)
        backwards = nested_info_nce(
            others[0],
            matches.rows.gather(anchors),
            dims=dims,
            temperature=self.temperature,
            targets=matches.targets,
            anchor_ids=matches.anchor_ids,
            candidate_ids=matches.pair_ids,
        )
        return matches.rows.mean((losses + backwards) / 2)


@dataclass
class EmbeddingConfig(NestedTrainingArguments):
    """
    Configuration that the trainers of all [`EmbeddingObjective`]s share.

    Args:
        temperature (`float`, *optional*, defaults to 0.05): tau (m3BERT, section 3.1).
        learn_temperature (`bool`, *optional*, defaults to `False`): Train tau, starting from `temperature`.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` or `"anchor"`.
        symmetric (`bool`, *optional*, defaults to `False`): Contrast in both directions.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Equal texts are no negatives of each other.
        unsupervised (`bool`, *optional*, defaults to `False`): One text column; a text's positive is the text itself
            under another dropout mask (SimCSE).
        text_columns (`list[str]`, *optional*): Columns with text: anchor, positive, then hard negatives. `None` takes
            those of the dataset, in its order. `"title+text"` joins two fields.
        field_separator (`str`, *optional*): Between joined fields; `None` is the tokenizer's separator token.
        max_length (`int`, *optional*, defaults to 512): Longest text in tokens.
        projection_dim (`int`, *optional*): Train a projection of the last layer's pooled embedding to so many
            dims, and publish it with the model ([`Projection`]). The grid is of its dims, by default all of them.
        mini_batch_size (`int`, *optional*): Texts to encode at a time, with their gradients cached, so that the
            encoder's memory does not grow with the batch. `None` encodes all at once, which is faster.

    Defaults that differ from [`~transformers.TrainingArguments`]: `learning_rate` 2e-5 and
    `per_device_train_batch_size` 32 (m3BERT, section 3.1, public data sets); `dataloader_drop_last`, since a smaller
    last batch has fewer negatives.

    Negatives come from the batches of all devices. Gradient accumulation adds none: it averages the losses of smaller
    batches; for a larger batch, raise `per_device_train_batch_size` and set `mini_batch_size`.

    Raises:
        ValueError: if a value is out of range, or a batch would hold one pair without negatives.
    """

    temperature: float = field(default=0.05, metadata={"help": "Cosines are divided by it."})
    learn_temperature: bool = field(default=False, metadata={"help": "Train the temperature, from there on."})
    pooling: Pooling = field(default="mean", metadata={"help": "'mean' over real tokens, or 'anchor'."})
    symmetric: bool = field(default=False, metadata={"help": "Contrast positives with all anchors, too."})
    mask_duplicates: bool = field(default=True, metadata={"help": "Equal texts are no negatives of each other."})
    unsupervised: bool = field(
        default=False, metadata={"help": "One text column; its positive is itself under another dropout mask."}
    )
    text_columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "Columns with text: anchor, positive, hard negatives; 'title+text' joins two fields. Default: "
            "all, in the dataset's order."
        },
    )
    field_separator: str | None = field(
        default=None, metadata={"help": "Between joined fields. Default: the tokenizer's separator token."}
    )
    max_length: int = field(default=512, metadata={"help": "Longest text in tokens."})
    projection_dim: int | None = field(
        default=None,
        metadata={"help": "Train a projection of the embedding to so many dims, published with the model."},
    )
    mini_batch_size: int | None = field(
        default=None,
        metadata={"help": "Texts to encode at a time, with cached gradients, for batches of any size."},
    )
    learning_rate: float = field(default=2e-5, metadata={"help": "Initial learning rate of AdamW."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Pairs a device and step."})
    dataloader_drop_last: bool = field(default=True, metadata={"help": "Drop the smaller last batch."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mini_batch_size is not None and self.mini_batch_size < 1:
            raise ValueError(f"mini_batch_size={self.mini_batch_size} must be 1 or more.")
        if self.train_batch_size * self.world_size < 2 and len(self.text_columns or []) < 3:
            raise ValueError(
                "per_device_train_batch_size=1 leaves a contrastive loss without negatives; use 2 or more."
            )

    def grid_for(self, config: Any) -> Grid:
        if self.projection_dim is not None and self.grid is None:
            return Grid.product([config.num_hidden_layers], [self.projection_dim])
        return super().grid_for(config)

    def columns_of(self, *datasets: Any) -> list[str]:
        """
        The text columns: those that were named, or all of the first dataset that names its own.

        Raises:
            ValueError: if there are fewer than the objective contrasts.
        """
        columns = self.named_columns(*datasets)
        found = ", ".join(columns) or "none"
        if self.unsupervised and len(columns) != 1:
            raise ValueError(f"Unsupervised training takes one text column; found: {found}. Name one in text_columns.")
        if not self.unsupervised and len(columns) < 2:
            raise ValueError(f"Contrastive training needs two text columns or more; found: {found}.")
        return columns

    def named_columns(self, *datasets: Any) -> list[str]:
        """`text_columns`, or all of the first dataset that names its own."""
        if self.text_columns is not None:
            return self.text_columns
        named = [list(dataset.column_names or []) for dataset in datasets if dataset is not None]
        return next((names for names in named if names), [])

    def embedding_arguments(self) -> dict[str, Any]:
        """What every [`EmbeddingObjective`] takes from here."""
        names = ("temperature", "pooling", "symmetric", "mask_duplicates", "learn_temperature")
        return {name: getattr(self, name) for name in names}


class EmbeddingTrainer(NestedTrainer):
    """
    Base of the trainers of [`EmbeddingObjective`]s; each says in `build_objective` which one it is. What it saves is
    read by `SentenceTransformer` with the pooling of the training.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The encoder.
        args ([`EmbeddingConfig`]): How to train.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        train_dataset ([`~datasets.Dataset`], *optional*): Text columns: anchor, positive, and any hard negatives.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): The same columns.
        teacher ([`TeacherEmbeddings`], *optional*): Of the texts of all columns, for objectives that have a teacher.
        kwargs: As for [`NestedTrainer`].

    Raises:
        ValueError: as [`NestedTrainer`], or for arguments out of range, or for dropout views of a model without
            dropout.
    """

    def __init__(
        self,
        model: nn.Module,
        args: EmbeddingConfig,
        processing_class: PreTrainedTokenizerBase,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        teacher: TeacherEmbeddings | None = None,
        **kwargs: Any,
    ):
        eval_sets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        columns = args.columns_of(train_dataset, *eval_sets)
        if args.unsupervised and not has_dropout(model):
            raise ValueError(
                f"{type(model).__name__} has no dropout (see its config): two views of a text would be the same."
            )
        super().__init__(
            model=model,
            objective=self.build_objective(args, args.grid_for(model.config)),
            args=args,
            data_collator=TextColumnsCollator(
                processing_class,
                columns,
                args.max_length,
                separator=args.field_separator,
                views=2 if args.unsupervised else 1,
                teacher=teacher,
            ),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            columns=tuple(name for column in columns for name in fields_of(column)),
            mini_batch_size=args.mini_batch_size,
            projection=(
                Projection(unwrap_encoder(model).config.hidden_size, args.projection_dim)
                if args.projection_dim is not None
                else None
            ),
            **kwargs,
        )

    def build_objective(self, args: Any, grid: Grid) -> Objective:
        """The objective that this configuration describes."""
        raise NotImplementedError(f"{type(self).__name__} must define build_objective.")

    def save_modules(self, output_dir: str) -> None:
        """Write pooling and projection beside the backbone, as modules of sentence-transformers."""
        config = unwrap_encoder(self.backbone).config
        write_modules(
            output_dir,
            width=width_of(config),
            pooling=self.args.pooling,
            causal=family_of(config).causal,
            projection=self.projection,
        )


def has_dropout(model: nn.Module) -> bool:
    """Whether a backbone has dropout anywhere but in a classification head: by its config, which also holds that of
    attention, or in a module, which also may be an adapter's."""
    return any(
        "dropout" in name and "classifier" not in name and isinstance(value, int | float) and value > 0
        for name, value in model.config.to_dict().items()
    ) or any(isinstance(module, nn.Dropout) and module.p > 0 for module in unwrap_encoder(model).modules())
