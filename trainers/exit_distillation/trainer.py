"""Exit distillation: train every granularity to embed like the full depth did before, in the same space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from ...data.teacher import TeacherEmbeddings
from ...encode.granularity import EncoderConfig, Grid, is_elastic
from ...encode.states import unwrap_encoder
from ...modeling.configuration_elastic import Elasticity
from ...utils.help_texts import described
from ...utils.papers import Identity
from ..core.composition import Composition
from ..core.objective import Objective
from ..core.optimizer import set_learning_rate
from ..distillation.trainer import DistillationConfig, DistillationTrainer
from .cross_depth import CrossDepth
from .teacher_space import TeacherSpace


class ExitDistillation(TeacherSpace):
    """
    [`TeacherSpace`] with the student's own full depth, before training, as the teacher. With fitted exits, every depth
    starts in the teacher's space; the full depth itself starts with a loss of 0.

    Args:
        kwargs: Arguments of [`TeacherSpace`].
    """

    name = "exit_distillation"
    title = "Exit distillation"
    tags = ("exit-distillation", "distillation", "matryoshka", "sentence-similarity")

    @property
    def identity(self) -> Identity:
        """With the loss that is used."""
        what = "KL divergence from the teacher's similarities" if self.loss == "similarity" else "InfoNCE"
        equation = f"{what} at every granularity, against the full depth's embeddings before training"
        return Identity(self.title, equation, self.papers, self.tags)


@described
@dataclass
class ExitDistillationConfig(DistillationConfig):
    """
    Configuration of [`ExitDistillationTrainer`], in addition to the fields of [`DistillationConfig`].

    Args:
        loss (`str`, *optional*, defaults to `"similarity"`): `similarity` (match the teacher's similarities to the
            candidates) or `contrastive` (InfoNCE with the teacher's embedding of the same text as the positive).
        temperature (`float`, *optional*, defaults to 0.05): Temperature tau; similarities are divided by it.
        alignment (`float`, *optional*, defaults to 10.0): Weight of `1 - cosine` to the teacher's embedding of the
            text, in addition to the loss.
        full_size_weight (`float`, *optional*, defaults to 20.0): Weight of the full size, which should not change.
        state_only_weight (`float`, *optional*, defaults to 0.5): Weight of the same losses for the state-only
            maps of layers that read the static table, which native exports have.
        candidates (`int`, *optional*, defaults to 4096): Number of embeddings that are drawn from the teacher's cache
            at each step, in addition to those of the batch.
        pair_weight (`float`, *optional*, defaults to 0.0): Weight of [`CrossDepth`] on labelled pairs: the query at
            any granularity, its positive at the last layer. Needs two text columns or more, and a grid with the last
            layer.
        pair_temperature (`float`, *optional*, defaults to 0.05): Temperature of [`CrossDepth`].
        learning_rate (`float`, *optional*, defaults to 3e-4): Initial learning rate of AdamW.
        table_learning_rate (`float`, *optional*, defaults to 5e-3): Initial learning rate of the static table, if the
            model has one. Its rows have no weight decay.
        per_device_train_batch_size (`int`, *optional*, defaults to 64): Rows per device and step.

    The default grid has every fitted depth and the last one, at 16, 32, 64, ... dims and the hidden size. For a native
    export, it is the full size. Exits of layers outside the grid are dropped. Without `teacher_name_or_path`,
    the teacher is the model itself as it was loaded: the folder or Hub id that it came from. The teacher reads texts
    of up to `max_length` tokens, or fewer if it was published for shorter texts, unless `teacher_max_length` is set.
    """

    objective_fields = (
        "pooling", "loss", "temperature", "alignment", "full_size_weight", "state_only_weight", "candidates"
    )  # fmt: skip

    loss: str = "similarity"
    temperature: float = 0.05
    alignment: float = 10.0
    full_size_weight: float = 20.0
    state_only_weight: float = 0.5
    candidates: int = 4096
    pair_weight: float = 0.0
    pair_temperature: float = 0.05
    learning_rate: float = 3e-4
    table_learning_rate: float = 5e-3
    per_device_train_batch_size: int = 64

    def columns_of(self, *datasets: Any) -> list[str]:
        columns = super().columns_of(*datasets)
        if self.pair_weight and len(columns) < 2:
            raise ValueError(f"pair_weight needs two text columns or more; found: {', '.join(columns)}.")
        return columns

    def grid_for(self, config: EncoderConfig) -> Grid:
        if self.grid is not None or (self.projection_dim is not None and not is_elastic(config)):
            return super().grid_for(config)
        sizes = is_elastic(config) or getattr(config, "matryoshka_layers", None) is not None
        return Grid.of(config).validate(config) if sizes else Grid.full_size(config)

    def for_student(self, model: nn.Module) -> Self:
        return self.with_student_as_teacher(model).with_length_of_student()

    def build_distillation(self, grid: Grid, teacher: TeacherEmbeddings) -> Objective:
        distillation = ExitDistillation(grid, bank=torch.from_numpy(teacher.vectors), **self.objective_arguments())
        if self.pair_weight == 0:
            return distillation
        pairs = CrossDepth(grid, temperature=self.pair_temperature, pooling=self.pooling or self.default_pooling)
        return Composition({"distillation": (1.0, distillation), "pairs": (self.pair_weight, pairs)})


class ExitDistillationTrainer(DistillationTrainer):
    """
    Trains every granularity of a model with exits to embed texts like its full depth did before training, with
    [`ExitDistillation`] and an [`ExitDistillationConfig`]. Start from a model with fitted exits
    ([`fit_exits`]); no labels are needed.
    """

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        encoder: Any = unwrap_encoder(self.backbone)
        if fresh and Elasticity.of(encoder.config).table:
            set_learning_rate(optimizer, [encoder.elastic.table.weight], self.args.table_learning_rate)
        return optimizer
