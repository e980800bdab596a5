"""Contrastive training of pairs at every granularity of a grid: Matryoshka fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from .collators import TextColumnsCollator
from .granularity import Grid
from .losses import info_nce
from .nested import POOLINGS, Pooling, prefix
from .objective import NestedBatch, Objective
from .trainer import NestedTrainer, NestedTrainingArguments


REDUCTIONS = ("sum", "mean")


class Contrastive(Objective):
    """
    InfoNCE of pooled embeddings with in-batch negatives at every granularity of a grid (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), Eqs. 1 and 4). The first text column holds the anchors, the
    second their positives; further columns are hard negatives, and negatives of every anchor of the batch.

    Args:
        grid ([`Grid`]): The granularities to train.
        temperature (`float`, *optional*, defaults to 0.05): tau; cosines are divided by it.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, or `"anchor"`.
        reduction (`str`, *optional*, defaults to `"sum"`): Of the terms over the grid: `"sum"` (m3BERT, MIPIC) or
            `"mean"` (MIC).

    Raises:
        ValueError: if an argument is out of range; in forward, for a batch of one pair without hard negatives.
    """

    name = "contrastive"

    def __init__(self, grid: Grid, temperature: float = 0.05, pooling: Pooling = "mean", reduction: str = "sum"):
        super().__init__(grid)
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} must be above 0.")
        for argument, value, legal in (("pooling", pooling, POOLINGS), ("reduction", reduction, REDUCTIONS)):
            if value not in legal:
                raise ValueError(f"{argument}={value!r} is unknown; legal values: {', '.join(legal)}.")
        self.temperature, self.pooling, self.reduction = temperature, pooling, reduction

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        if len(batch.texts) < 2:
            raise ValueError(f"A contrastive loss needs two text columns or more; got {', '.join(batch.texts)}.")
        terms = {}
        for layer in self.layers:
            anchors, *others = (text.pooled(layer, self.pooling) for text in batch.texts.values())
            candidates = torch.cat(others)
            for granularity in (g for g in self.grid if g.layer == layer):
                terms[self.term(granularity)] = info_nce(
                    prefix(anchors, granularity.dim), prefix(candidates, granularity.dim), temperature=self.temperature
                )
        return terms

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        total = super().total(terms)
        return total / len(terms) if self.reduction == "mean" else total


@dataclass
class ContrastiveConfig(NestedTrainingArguments):
    """
    Configuration of [`ContrastiveTrainer`].

    Args:
        temperature (`float`, *optional*, defaults to 0.05): tau (section 3.1).
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` or `"anchor"`.
        reduction (`str`, *optional*, defaults to `"sum"`): `"sum"` or `"mean"` over the grid (Eq. 4 sums).
        text_columns (`list[str]`, *optional*): Columns with text: anchor, positive, then hard negatives. `None` takes
            those of the dataset, in its order.
        max_length (`int`, *optional*, defaults to 512): Longest text in tokens.

    Defaults that differ from [`~transformers.TrainingArguments`]: `learning_rate` 2e-5 and
    `per_device_train_batch_size` 32 (section 3.1, public data sets); `dataloader_drop_last`, since a smaller last
    batch has fewer negatives.

    Negatives come from one device's batch. Gradient accumulation adds none: it averages the losses of smaller batches.
    """

    temperature: float = field(default=0.05, metadata={"help": "Cosines are divided by it."})
    pooling: Pooling = field(default="mean", metadata={"help": "'mean' over real tokens, or 'anchor'."})
    reduction: str = field(default="sum", metadata={"help": "Of the losses over the grid: 'sum' or 'mean'."})
    text_columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "Columns with text: anchor, positive, hard negatives. Default: all, in the dataset's order."
        },
    )
    max_length: int = field(default=512, metadata={"help": "Longest text in tokens."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Initial learning rate of AdamW."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Pairs a device and step."})
    dataloader_drop_last: bool = field(default=True, metadata={"help": "Drop the smaller last batch."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_device_train_batch_size < 2 and len(self.text_columns or []) < 3:
            raise ValueError(
                "per_device_train_batch_size=1 leaves a contrastive loss without negatives; use 2 or more."
            )


class ContrastiveTrainer(NestedTrainer):
    """
    Trains an encoder on pairs at every granularity of a grid, with [`Contrastive`].

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The encoder.
        args ([`ContrastiveConfig`]): How to train.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        train_dataset ([`~datasets.Dataset`], *optional*): Text columns: anchor, positive, and any hard negatives.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): The same columns.
        kwargs: As for [`NestedTrainer`].

    Raises:
        ValueError: as [`NestedTrainer`], or for arguments out of range.
    """

    _name = "Matryoshka contrastive"
    _tag_names = ("m3bert", "contrastive", "matryoshka", "sentence-similarity")
    _paper = {"title": "m3BERT: A Modern, Multi-lingual, Matryoshka Bidirectional Encoder", "id": "2605.19568"}

    def __init__(
        self,
        model: nn.Module,
        args: ContrastiveConfig,
        processing_class: PreTrainedTokenizerBase,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **kwargs: Any,
    ):
        columns = args.text_columns
        if columns is None:
            some_dataset = train_dataset if train_dataset is not None else eval_dataset
            columns = list(some_dataset.column_names or []) if some_dataset is not None else []
        if len(columns) < 2:
            raise ValueError(
                f"Contrastive training needs two text columns or more; found: {', '.join(columns) or 'none'}."
            )
        super().__init__(
            model=model,
            objective=Contrastive(args.grid_for(model.config), args.temperature, args.pooling, args.reduction),
            args=args,
            data_collator=TextColumnsCollator(processing_class, columns, args.max_length),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            columns=tuple(columns),
            **kwargs,
        )
