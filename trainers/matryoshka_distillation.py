"""Matryoshka distillation: inside one model, large granularities teach small ones to predict masked tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .granularity import Granularity, Grid
from .losses import nested_cross_entropy_and_divergence
from .multigranular_mlm import MultigranularMLM, MultigranularMLMConfig, MultigranularMLMTrainer
from .objective import NestedBatch


DIRECTIONS = ("reverse", "forward")
# A teacher whose loss is above this share of a uniform guess's has learned next to nothing.
SHARE_OF_A_GUESS = 0.9
ROWS_TO_LOOK_AT = 32


class MatryoshkaDistillation(MultigranularMLM):
    """
    [`MultigranularMLM`], and for pairs of granularities the KL divergence between their distributions of the masked
    tokens, the teacher's without gradient (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), section
    4.2, Eqs. 2 and 3): `sum of cross-entropies + weight * sum of divergences`. All are made in one pass over the
    vocabulary.

    Args:
        grid ([`Grid`]): The granularities to train.
        pairs (`str`): Who teaches whom: `"12x768>4x64"`, `"12x768>all"`; see [`Grid.pairs`].
        weight (`float`, *optional*, defaults to 1.0): lambda_D.
        temperature (`float`, *optional*, defaults to 1.0): tau_D.
        direction (`str`, *optional*, defaults to `"reverse"`): `"reverse"` is KL(student || teacher), as printed;
            `"forward"` KL(teacher || student).

    Raises:
        ValueError: if the pairs cannot be read or an argument is out of range; in forward, as [`MultigranularMLM`].
    """

    def __init__(
        self,
        grid: Grid,
        pairs: str,
        *,
        weight: float = 1.0,
        temperature: float = 1.0,
        direction: str = "reverse",
    ):
        super().__init__(grid)
        if weight <= 0:
            raise ValueError(f"distillation_weight={weight} must be above 0; without it, it is MultigranularMLM.")
        if temperature <= 0:
            raise ValueError(f"distillation_temperature={temperature} must be above 0.")
        if direction not in DIRECTIONS:
            raise ValueError(f"direction={direction!r} is unknown; legal values: {', '.join(DIRECTIONS)}.")
        self.pairs, self.weight = grid.pairs(pairs), weight
        self.temperature, self.direction = temperature, direction

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
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
        return self.terms(losses, batch) | dict(zip(map(self.divergence_term, self.pairs), means, strict=True))

    def place(self, granularity: Granularity) -> tuple[int, int]:
        """Where a granularity is among the layers and dims of the grid."""
        return self.layers.index(granularity.layer), self.grid.dims.index(granularity.dim)

    def divergence_term(self, pair: tuple[Granularity, Granularity]) -> str:
        """Name of the divergence of a student and its teacher, as it is logged."""
        student, teacher = pair
        return f"{self.name}_kl_{teacher}>{student}"

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        taught = [terms[self.divergence_term(pair)] for pair in self.pairs]
        predicted = [terms[self.term(g)] for g in self.grid]
        return torch.stack(predicted).sum() + self.weight * torch.stack(taught).sum()


@dataclass
class MatryoshkaDistillationConfig(MultigranularMLMConfig):
    """
    Configuration of [`MatryoshkaDistillationTrainer`]: that of [`MultigranularMLMConfig`], and

    Args:
        pairs (`str`): Who teaches whom: `"12x768>4x64"`, `"12x64>4x64"`, `"12x768>all"`; see [`Grid.pairs`].
        distillation_weight (`float`, *optional*, defaults to 1.0): lambda_D (A.2).
        distillation_temperature (`float`, *optional*, defaults to 1.0): tau_D (A.2).
        distillation_direction (`str`, *optional*, defaults to `"reverse"`): KL(student || teacher), as printed
            (Eq. 2), or `"forward"`.
        allow_untrained_teacher (`bool`, *optional*, defaults to `False`): Start even if a teacher predicts no better
            than a guess. The paper found that unstable (A.2), and began after 300,000 steps of multigranular MLM.
    """

    pairs: str | None = field(
        default=None, metadata={"help": "Teacher>student: '12x768>4x64', '12x768>all', several separated by ';'."}
    )
    distillation_weight: float = field(default=1.0, metadata={"help": "Of the divergences."})
    distillation_temperature: float = field(default=1.0, metadata={"help": "Of both distributions."})
    distillation_direction: str = field(
        default="reverse", metadata={"help": "reverse: KL(student || teacher); forward: KL(teacher || student)."}
    )
    allow_untrained_teacher: bool = field(
        default=False, metadata={"help": "Start even if a teacher predicts no better than a guess."}
    )


class MatryoshkaDistillationTrainer(MultigranularMLMTrainer):
    """
    Trains a masked language model at every granularity of a grid, small ones also to agree with large ones, with
    [`MatryoshkaDistillation`]. Starts from a model that was trained with [`MultigranularMLMTrainer`].

    Args:
        args ([`MatryoshkaDistillationConfig`]): How to train.
        kwargs: As for [`MultigranularMLMTrainer`].

    Raises:
        ValueError: as [`MultigranularMLMTrainer`], or for pairs that cannot be read; in `train`, if a teacher predicts
            masked tokens no better than a guess.
    """

    _name = "Matryoshka distillation"
    _tag_names = ("m3bert", "multigranular-mlm", "distillation", "matryoshka")
    _equation = "Eqs. 2 and 3: masked-token cross-entropy over layers and dims, and KL divergence from small to large"

    def build_objective(self, args: MatryoshkaDistillationConfig, grid: Grid) -> MatryoshkaDistillation:
        if args.pairs is None:
            raise ValueError("Matryoshka distillation needs pairs='teacher>student', such as '12x768>4x64'.")
        return MatryoshkaDistillation(
            grid,
            args.pairs,
            weight=args.distillation_weight,
            temperature=args.distillation_temperature,
            direction=args.distillation_direction,
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if not resume_from_checkpoint and not self.args.allow_untrained_teacher:
            self.require_trained_teachers()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def require_trained_teachers(self) -> None:
        """
        Check that the teachers predict masked tokens, on the first rows of the training data.

        Raises:
            ValueError: if one of them predicts no better than a guess.
        """
        nested = self.accelerator.unwrap_model(self.model)
        was_training = nested.training
        device = next(nested.parameters()).device
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self.compute_loss_context_manager():
            columns = (*self.columns, *self._optional_columns)
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
                    f"{teacher} is to teach, but it predicts masked tokens with a loss of {loss:.2f}; a guess has "
                    f"{guess:.2f}. Distillation from an untrained teacher is unstable: train with multigranular MLM "
                    "first, or set allow_untrained_teacher."
                )
