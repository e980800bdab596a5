"""Multigranular masked-language modelling: stages 1 and 2 of m3BERT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from . import papers
from .arguments import NestedTrainingArguments
from .granularity import Grid
from .losses import nested_cross_entropy
from .objective import NestedBatch, Objective
from .trainer import NestedTrainer


class MultigranularMLM(Objective):
    """
    Cross-entropy of the masked tokens at every granularity of a grid, summed over the grid (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), section 2.1). The projection is the backbone's own:
    granularity (l, d) has the logits `state_l[:d] @ W[:d, :] + b`. A transform before it, as BERT's head has, is not
    used.

    A batch without a masked token has the loss 0.

    Args:
        grid ([`Grid`]): The granularities to train.

    Raises:
        ValueError: in forward, if the backbone has no vocabulary projection or the batch no labels.
    """

    name = "mlm"
    normalizes_by_num_items = True

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        head, states, targets = self.masked(batch)
        losses = nested_cross_entropy(
            states.flatten(0, 1), head.weight, head.bias, targets.repeat(len(states)), dims=self.grid.dims
        )
        return self.terms(losses.view(*states.shape[:2], len(self.grid.dims)), batch)

    def masked(self, batch: NestedBatch) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
        """The projection, the states of the masked tokens `(layers, tokens, hidden_size)`, and what they hide
        `(tokens,)`."""
        if batch.output_embeddings is None:
            raise ValueError(
                "Masked-LM training needs a backbone with a vocabulary projection (AutoModelForMaskedLM)."
            )
        if batch.labels is None:
            raise ValueError("Masked-LM training needs labels; DataCollatorForLanguageModeling makes them.")
        masked = batch.labels != -100
        (text,) = batch.texts.values()
        states = torch.stack([text.layers[layer][masked] for layer in self.layers])
        return batch.output_embeddings, states, batch.labels[masked]

    def mean(self, values: torch.Tensor, dim: int, batch: NestedBatch) -> torch.Tensor:
        """The mean over masked tokens: of the whole optimizer step, where their number is known."""
        count = values.shape[dim] if batch.num_items_in_batch is None else batch.num_items_in_batch
        return values.sum(dim=dim) / torch.as_tensor(count).clamp(min=1)

    def terms(self, losses: torch.Tensor, batch: NestedBatch) -> dict[str, torch.Tensor]:
        """The named means of losses `(layers, tokens, dims)`."""
        means = self.mean(losses, 1, batch)
        return {self.term(g): means[self.layers.index(g.layer), self.grid.dims.index(g.dim)] for g in self.grid}


@dataclass
class MultigranularMLMConfig(NestedTrainingArguments):
    """
    Configuration of [`MultigranularMLMTrainer`].

    Args:
        mlm_probability (`float`, *optional*, defaults to 0.15): Share of tokens to predict. 0.3 is unstable here
            (section 2.3).
        max_length (`int`, *optional*, defaults to 512): Longest text in tokens.

    Defaults that differ from [`~transformers.TrainingArguments`] are those of stages 1 and 2 (section 2.3):
    `learning_rate` 1e-4, `weight_decay` 0.01, `lr_scheduler_type` cosine, `warmup_steps` 10,000. The paper trains in
    bf16 (`bf16=True`).
    """

    mlm_probability: float = field(default=0.15, metadata={"help": "Share of tokens to predict."})
    max_length: int = field(default=512, metadata={"help": "Longest text in tokens."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Initial learning rate of AdamW."})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay, but for biases and norms."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning-rate schedule."})
    warmup_steps: float = field(default=10_000, metadata={"help": "Steps of linear warm-up; below 1 a share of all."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"mlm_probability={self.mlm_probability} must be between 0 and 1.")


class MultigranularMLMTrainer(NestedTrainer):
    """
    Trains a masked language model at every granularity of a grid, with [`MultigranularMLM`].

    Args:
        model ([`~transformers.PreTrainedModel`]): A backbone with a masked-LM head.
        args ([`MultigranularMLMConfig`]): How to train.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer with a mask token.
        train_dataset ([`~datasets.Dataset`], *optional*): Tokenised texts, in a column `input_ids`.
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): The same.
        kwargs: As for [`NestedTrainer`].

    Raises:
        ValueError: as [`NestedTrainer`], or if the tokenizer has no mask token.
    """

    _optional_columns = ("attention_mask", "special_tokens_mask")
    _name = "Multigranular MLM"
    _tag_names: tuple[str, ...] = ("m3bert", "multigranular-mlm", "matryoshka")
    _paper = papers.M3BERT
    _equation: str = "section 2.1: masked-token cross-entropy, summed over layers and dims"

    def __init__(
        self,
        model: nn.Module,
        args: MultigranularMLMConfig,
        processing_class: PreTrainedTokenizerBase,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **kwargs: Any,
    ):
        if processing_class.mask_token is None:
            raise ValueError(f"{type(processing_class).__name__} has no mask token, which masked-LM training needs.")
        super().__init__(
            model=model,
            objective=self.build_objective(args, args.grid_for(model.config)),
            args=args,
            data_collator=DataCollatorForLanguageModeling(processing_class, mlm_probability=args.mlm_probability),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            columns=("input_ids",),
            **kwargs,
        )

    def build_objective(self, args: Any, grid: Grid) -> MultigranularMLM:
        """The objective that this configuration describes."""
        return MultigranularMLM(grid)
