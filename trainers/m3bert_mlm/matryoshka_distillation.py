"""Matryoshka distillation: large granularities of a model teach its small ones to predict masked tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from ...encode.granularity import Granularity, Grid
from ...utils.help_texts import described
from ..core.objective import NestedBatch, Terms, require_known
from .losses import nested_cross_entropy_and_divergence
from .multigranular_mlm import MultigranularMLM, MultigranularMLMConfig, MultigranularMLMTrainer


DIRECTIONS = ("reverse", "forward")
# A teacher counts as untrained if its loss is above this share of the loss of a uniform guess.
SHARE_OF_A_GUESS = 0.9
ROWS_TO_LOOK_AT = 32


class MatryoshkaDistillation(MultigranularMLM):
    """
    [`MultigranularMLM`] plus KL divergences between the predictions of pairs of granularities, with detached teachers
    (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), section 4.2, Eqs. 2 and 3): `sum of
    cross-entropies + distillation_weight * sum of divergences`. All terms are computed in one pass over the
    vocabulary. The bias of the head is part of the distributions, as in the cross-entropy; A.2 prints them without it.
    The paper does not say which tokens are compared, nor whether a teacher has a gradient: masked tokens alone, whose
    predictions are computed anyway, and detached teachers are our choice.

    Args:
        grid ([`Grid`]): The granularities to train.
        pairs (`str`): Pairs of teacher and student, such as `"12x768>4x64"` or `"12x768>all"`; see [`Grid.pairs`].

    The other arguments are fields of [`MatryoshkaDistillationConfig`].

    Raises:
        ValueError: if `pairs` cannot be parsed or an argument is out of range; in forward, as [`MultigranularMLM`].
    """

    title = "Matryoshka distillation"
    equation = "m3BERT, Eqs. 2 and 3: multigranular MLM, and KL divergence between granularities"
    tags = ("m3bert", "multigranular-mlm", "distillation", "matryoshka")

    def __init__(
        self,
        grid: Grid,
        *,
        pairs: str | None,
        distillation_weight: float = 1.0,
        distillation_temperature: float = 1.0,
        distillation_direction: str = "reverse",
    ):
        super().__init__(grid)
        if pairs is None:
            raise ValueError("Matryoshka distillation needs pairs='teacher>student', such as '12x768>4x64'.")
        require_known(DIRECTIONS, distillation_direction=distillation_direction)
        self.pairs, self.weight = grid.pairs(pairs), distillation_weight
        self.temperature, self.direction = distillation_temperature, distillation_direction

    def forward(self, batch: NestedBatch) -> Terms:
        head, states, targets = self.masked(batch)
        losses, divergences = nested_cross_entropy_and_divergence(
            states,
            head.weight,
            head.bias,
            targets,
            dims=self.grid.dims,
            pairs=[(self.place(student), self.place(teacher)) for student, teacher in self.pairs],
            reverse=self.direction == "reverse",
            temperature=self.temperature,
        )
        means = self.mean(divergences, 1, batch).unbind()
        divergence_terms = [
            self.term(name=f"kl_{teacher}>{student}", weight=self.weight) for student, teacher in self.pairs
        ]
        return self.terms(losses, batch) | dict(zip(divergence_terms, means, strict=True))

    def place(self, granularity: Granularity) -> tuple[int, int]:
        """Index of a granularity's layer and index of its dim in the grid."""
        return self.layers.index(granularity.layer), self.grid.dims.index(granularity.dim)


@described
@dataclass
class MatryoshkaDistillationConfig(MultigranularMLMConfig):
    """
    Configuration of [`MatryoshkaDistillationTrainer`], in addition to the fields of [`MultigranularMLMConfig`].

    Args:
        pairs (`str`): Pairs of granularities, teacher first: `12x768>4x64`, `12x64>4x64`, `12x768>all`. Separate
            several pairs with `;`. See [`Grid.pairs`].
        distillation_weight (`float`, *optional*, defaults to 1.0): Weight of the KL divergences, lambda_D (m3BERT,
            A.2).
        distillation_temperature (`float`, *optional*, defaults to 1.0): Temperature of both distributions, tau_D
            (m3BERT, A.2).
        distillation_direction (`str`, *optional*, defaults to `"reverse"`): Direction of the KL divergence:
            `"reverse"` is KL(student || teacher), as in Eq. 2 of m3BERT; `"forward"` is KL(teacher || student).
        allow_untrained_teacher (`bool`, *optional*, defaults to `False`): Start even if a teacher predicts masked
            tokens hardly better than a uniform guess. The paper found this unstable (A.2) and started after 300,000
            steps of multigranular MLM.
    """

    objective_class = MatryoshkaDistillation
    objective_fields = ("pairs", "distillation_weight", "distillation_temperature", "distillation_direction")

    pairs: str | None = None
    distillation_weight: float = 1.0
    distillation_temperature: float = 1.0
    distillation_direction: str = "reverse"
    allow_untrained_teacher: bool = False


class MatryoshkaDistillationTrainer(MultigranularMLMTrainer):
    """
    Trains a masked language model at every granularity of a grid, with distillation from large to small granularities
    ([`MatryoshkaDistillation`]). Start from a model that was trained with [`MultigranularMLMTrainer`].

    Raises:
        ValueError: as [`MultigranularMLMTrainer`]; in `train`, if a teacher is untrained.
    """

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if not resume_from_checkpoint and not self.args.allow_untrained_teacher:
            self.require_trained_teachers()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def require_trained_teachers(self) -> None:
        """
        Check on the first rows of the training data that the teachers predict masked tokens.

        Raises:
            ValueError: if the loss of a teacher is close to that of a uniform guess, or above it.
        """
        nested = self.accelerator.unwrap_model(self.model)
        was_training = nested.training
        device = next(nested.parameters()).device
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self.compute_loss_context_manager():
            columns = (*self.columns, *self.optional_columns)
            rows = [
                {name: row[name] for name in columns if name in row}
                for row in itertools.islice(self.train_dataset, ROWS_TO_LOOK_AT)
            ]
            batch = {name: value.to(device) for name, value in self.data_collator(rows).items()}
            terms = nested.eval()(**batch)["terms"]
        nested.train(was_training)
        guess = math.log(nested.backbone.get_output_embeddings().weight.shape[0])
        for teacher in sorted({teacher for _, teacher in nested.objective.pairs}):
            loss = terms[nested.objective.term(teacher)].item()
            if loss > SHARE_OF_A_GUESS * guess:
                raise ValueError(
                    f"The teacher {teacher} predicts masked tokens with a loss of {loss:.2f}; a uniform guess has "
                    f"{guess:.2f}. Distillation from an untrained teacher is unstable: train with multigranular MLM "
                    "first, or set allow_untrained_teacher."
                )
