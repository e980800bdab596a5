"""Multigranular masked-language modelling: stages 1 and 2 of m3BERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from datasets import Dataset
from transformers import (
    AutoModelForMaskedLM,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ...data.collators import MaskedLMCollator
from ...data.packing import DOCUMENT_LENGTHS
from ...data.streams import column_names_of
from ...encode.packed_rows import check_packable
from ...encode.states import unwrap_encoder
from ...utils import papers
from ...utils.help_texts import described
from ..core.arguments import NestedTrainingArguments
from ..core.backbone import backbone_of
from ..core.objective import NestedBatch, Objective, Terms
from ..core.publishing import PublishingTrainer
from .losses import nested_cross_entropy


if TYPE_CHECKING:
    from peft import PeftConfig


class MultigranularMLM(Objective):
    """
    Cross-entropy of the masked tokens at every granularity of a grid, summed over the grid (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), section 2.1). Granularity (l, d) has the logits
    `state_l[:d] @ W[:d, :] + b`, with the vocabulary projection W, b of the backbone. A transform before the
    projection, as in BERT's head, is not used. The hidden states of all layers of a pre-norm backbone pass its final
    norm first, as those of the last one do; the paper says "output of layer l", and its released code has no norm.

    The loss of a batch without masked tokens is 0.

    Args:
        grid ([`Grid`]): The granularities to train.

    Raises:
        ValueError: in forward, if the backbone has no vocabulary projection or the batch no labels.
    """

    name = "mlm"
    title = "Multigranular MLM"
    equation = "m3BERT, section 2.1: masked-token cross-entropy, summed over layers and dims"
    papers = (papers.M3BERT,)
    tags: ClassVar[tuple[str, ...]] = ("m3bert", "multigranular-mlm", "matryoshka")
    normalizes_by_num_items = True

    def forward(self, batch: NestedBatch) -> Terms:
        head, states, targets = self.masked(batch)
        losses = nested_cross_entropy(
            states.flatten(0, 1), head.weight, head.bias, targets.repeat(len(states)), dims=self.grid.dims
        )
        return self.terms(losses.view(*states.shape[:2], len(self.grid.dims)), batch)

    def masked(self, batch: NestedBatch) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """The vocabulary projection, the hidden states of the masked tokens `(layers, tokens, hidden_size)`, and their
        labels `(tokens,)`."""
        if batch.output_embeddings is None or batch.labels is None:
            raise ValueError("Masked-LM training needs a backbone with a vocabulary projection, and labels.")
        labels = batch.labels.flatten()
        masked = (labels != -100).nonzero().squeeze(1)  # a mask would be searched again for each layer
        (text,) = batch.texts.values()
        states = torch.stack([text.layers[layer].flatten(0, 1)[masked] for layer in self.layers])
        return batch.output_embeddings, states, labels[masked]

    def mean(self, values: torch.Tensor, dim: int, batch: NestedBatch) -> torch.Tensor:
        """The sum over masked tokens, divided by their number in the optimizer step, or in the batch if the former is
        unknown."""
        count = values.shape[dim] if batch.num_items_in_batch is None else batch.num_items_in_batch
        return values.sum(dim=dim) / torch.as_tensor(count).clamp(min=1)

    def terms(self, losses: torch.Tensor, batch: NestedBatch) -> Terms:
        """The terms of all granularities, from losses `(layers, tokens, dims)`."""
        means = self.mean(losses, 1, batch)
        return {self.term(g): means[self.layers.index(g.layer), self.grid.dims.index(g.dim)] for g in self.grid}


@described
@dataclass
class MultigranularMLMConfig(NestedTrainingArguments):
    """
    Configuration of [`MultigranularMLMTrainer`].

    Args:
        mlm_probability (`float`, *optional*, defaults to 0.15): Share of tokens to predict. The paper found 0.3
            unstable (m3BERT, section 2.3).
        max_length (`int`, *optional*, defaults to 512): Maximum length of a text in tokens; longer texts are
            truncated. Prepared data has its own.
        learning_rate (`float`, *optional*, defaults to 1e-4): Initial learning rate of AdamW.
        weight_decay (`float`, *optional*, defaults to 0.01): Weight decay of all parameters except biases and norms.
        lr_scheduler_type (`str`, *optional*, defaults to `"cosine"`): Learning-rate schedule.
        warmup_steps (`float`, *optional*, defaults to 10000): Steps of linear warm-up; below 1, a share of all steps.

    Defaults that differ from [`~transformers.TrainingArguments`] are those of stages 1 and 2 of m3BERT (section 2.3).
    The paper trains in bfloat16 (`bf16=True`).
    """

    objective_class: ClassVar[type[Objective]] = MultigranularMLM

    mlm_probability: float = 0.15
    max_length: int = 512
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"mlm_probability={self.mlm_probability} must be between 0 and 1.")


class MasksOfEpoch(TrainerCallback):
    """Makes the masks of a batch depend on the seed, the epoch and the batch only. Batches are made in advance, so
    masks from torch's generator would differ after resuming."""

    def __init__(self, collator: MaskedLMCollator) -> None:
        self.collator = collator

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.collator.key = (args.seed, 0)  # of an evaluation before the first epoch

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.collator.key = (args.seed, int(state.epoch))


class MultigranularMLMTrainer(PublishingTrainer):
    """
    Multigranular masked language modelling (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), section
    2.1), with [`MultigranularMLM`]: over the masked tokens t, with the first d dims of hidden state and vocabulary
    matrix,

        L = sum_l sum_d mean_t -log softmax(h_lt[:d] W[:, :d]^T + b)[token t]

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): A backbone with a masked-LM head, or its folder or Hub id.
        args ([`MultigranularMLMConfig`]): Training arguments.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*): Tokenizer with a mask token. Default:
            the one beside the backbone.
        train_dataset ([`~datasets.Dataset`], *optional*): Tokenised texts, in a column `input_ids`. Rows with a column
            `document_lengths` are packed ([`load_prepared`][m3bert.data.preparing.load_prepared]).
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*): Tokenised texts for evaluation.
        peft_config ([`~peft.PeftConfig`], *optional*): Train a new adapter of this kind instead of the whole backbone.
        kwargs: Further arguments of [`NestedTrainer`]. `compute_metrics` gets the logits of the full size
            `(texts, tokens, vocabulary)`, or what `preprocess_logits_for_metrics` makes of them, and the labels. It
            costs a second forward pass of the texts to evaluate.

    Raises:
        ValueError: as [`NestedTrainer`], if the tokenizer has no mask token, if rows are packed and the backbone
            cannot read packed rows, or if `compute_metrics` is passed with packed rows to evaluate.
    """

    gives_logits = True

    def __init__(
        self,
        model: Any,
        args: MultigranularMLMConfig,
        processing_class: PreTrainedTokenizerBase | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ):
        model, processing_class = backbone_of(model, processing_class, AutoModelForMaskedLM, peft_config)
        if processing_class.mask_token is None:
            raise ValueError(f"{type(processing_class).__name__} has no mask token, which masked-LM training needs.")
        if train_dataset is not None and DOCUMENT_LENGTHS in column_names_of(train_dataset):
            check_packable(unwrap_encoder(model).config)
        super().__init__(
            model=model,
            objective=args.build_objective(args.grid_for(model.config)),
            args=args,
            data_collator=MaskedLMCollator(processing_class, mlm_probability=args.mlm_probability),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            columns=("input_ids",),
            optional_columns=("attention_mask", "special_tokens_mask", DOCUMENT_LENGTHS),
            **kwargs,
        )
        if self.compute_metrics is not None:
            sets = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
            if any(DOCUMENT_LENGTHS in (each.column_names or ()) for each in sets if each is not None):
                raise ValueError("compute_metrics needs rows of one text each; rows of eval_dataset are packed.")
        self.add_callback(MasksOfEpoch(self.data_collator))

    def logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self.backbone(**{name: value for name, value in inputs.items() if name != "labels"}).logits
