"""Distillation at every granularity into the space of a teacher's embeddings, with the cache as extra candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...encode.granularity import Granularity, Grid
from ...encode.ranks import same_on_all_ranks
from ...encode.states import StateKey, StateOnly, truncate
from ..core.objective import NestedBatch, Terms, require_known, require_positive
from ..distillation.objective import RepresentationDistillation, TaughtTexts
from ..embedding.info_nce import nested_info_nce
from ..embedding.objective import NO_TEXT
from ..embedding.scored_losses import nested_pair_cosines
from ..embedding.similarity import nested_similarity_distillation


LOSSES = ("similarity", "contrastive")
SAME_TEXT = 1 - 1e-4  # cosine of two teacher embeddings from which their texts count as equal


class TeacherSpace(RepresentationDistillation):
    """
    Matches a prefix of the student's embedding to the same prefix of the teacher's, at every granularity of a grid.
    Student and teacher share one space: there is no map between them. Candidates are the teacher's embeddings of the
    texts in the batch and of texts that are drawn from the teacher's cache at each step; they cost no encoder pass.

    Args:
        grid ([`Grid`]): The granularities to train.
        bank (`torch.Tensor` of shape `(texts, teacher_dim)`): The teacher's embeddings to draw candidates from.
        loss (`str`, *optional*, defaults to `"similarity"`): `"similarity"` matches the distribution of a text's
            similarities over the candidates to the teacher's at all dims
            ([`nested_similarity_distillation`]); `"contrastive"` is InfoNCE with the teacher's embedding of the same
            text as the positive ([`nested_info_nce`]).
        alignment (`float`, *optional*, defaults to 0.0): Weight of `1 - cosine` between student and teacher, at the
            same prefix, in addition to the loss. Similarities to random texts say little about texts that are nearly
            equal; this keeps them apart.
        candidates (`int`, *optional*, defaults to 4096): Number of embeddings drawn from the bank per step.
        kwargs: Arguments of [`RepresentationDistillation`], except `teacher_dim`.

    The weights `full_size_weight` (1.0) and `state_only_weight` (0.0) are fields of [`ExitDistillationConfig`].

    Raises:
        ValueError: if an argument is out of range, or the grid has more dims than the teacher; in forward, if the
            batch has no embeddings of a teacher.
    """

    name = "teacher_space"
    title = "Distillation into a teacher's space"
    equation = "KL divergence from the teacher's similarities at every granularity"
    papers = ()

    def __init__(
        self,
        grid: Grid,
        *,
        bank: torch.Tensor,
        loss: str = "similarity",
        temperature: float = 0.05,
        alignment: float = 0.0,
        full_size_weight: float = 1.0,
        state_only_weight: float = 0.0,
        candidates: int = 4096,
        **kwargs: Any,
    ):
        super().__init__(grid, teacher_dim=bank.shape[1], **kwargs)
        require_known(LOSSES, loss=loss)
        require_positive(temperature=temperature)
        if grid.dims[-1] > self.teacher_dim:
            raise ValueError(
                f"The grid {grid} has more dims than the teacher, {self.teacher_dim}: fit exits to the teacher first "
                "(fit_exits), and distil from the fitted model."
            )
        self.alignment, self.full_size_weight, self.state_only_weight = alignment, full_size_weight, state_only_weight
        self.loss, self.temperature, self.candidates = loss, temperature, min(candidates, len(bank))
        self.bank = bank  # no buffer: it belongs to the teacher's cache, and is not saved with the objective

    @property
    def state_keys(self) -> list[StateKey]:
        layers = self.grid.layers
        maps = [StateOnly(layer) for layer in layers if layer > 0] if self.state_only_weight > 0 else []
        return [*maps, *layers]

    def drawn(self, like: torch.Tensor) -> torch.Tensor:
        """
        Candidates from the bank, `(candidates, teacher_dim)`, the same on all ranks: random ones in training, evenly
        spaced ones in evaluation.
        """
        if self.training:
            rows = same_on_all_ranks(torch.randint(len(self.bank), (self.candidates,)))
        else:
            rows = torch.linspace(0, len(self.bank) - 1, self.candidates).long()
        return self.bank[rows].to(like)

    def forward(self, batch: NestedBatch) -> Terms:
        taught = self.taught(batch)
        drawn = self.drawn(taught.teacher)
        candidates = torch.cat([taught.all_teachers, drawn])
        ids = self.ids_with(drawn, taught) if self.loss == "contrastive" else (None, None)
        texts = list(batch.texts.values())
        read: list[tuple[StateKey, int, str, float]] = [(layer, layer, "", 1.0) for layer in self.grid.layers]
        for key in self.state_keys:
            if isinstance(key, StateOnly) and key in texts[0].layers:
                read.append((key, key.depth, "state_only", self.state_only_weight))
        terms: Terms = {}
        for key, layer, name, weight in read:
            students = torch.cat([text.pooled(key, self.pooling) for text in texts])
            dims = self.grid.dims_of(layer)
            losses = taught.rows.mean(self.losses_of(students, dims, candidates, taught, ids))
            for dim, loss in zip(dims, losses, strict=True):
                g = Granularity(layer, dim)
                of_full = self.full_size_weight if g == self.grid.full else 1.0
                terms[self.term(g, name, weight=weight * of_full)] = loss
        return terms

    def losses_of(
        self,
        students: torch.Tensor,
        dims: Sequence[int],
        candidates: torch.Tensor,
        taught: TaughtTexts,
        ids: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> torch.Tensor:
        """The loss of each text of this rank at every dim, `(texts, dims)`, from embeddings `(texts, width)`."""
        if self.loss == "similarity":
            losses = nested_similarity_distillation(
                students, taught.teacher, candidates, dims, temperature=self.temperature
            ).T
        else:
            losses = nested_info_nce(
                students,
                candidates,
                dims=dims,
                temperature=self.temperature,
                targets=taught.targets,
                anchor_ids=ids[0],
                candidate_ids=ids[1],
            )
        if self.alignment:
            losses = losses + self.alignment * (1 - nested_pair_cosines(students, taught.teacher, dims)).T
        return losses

    def ids_with(self, drawn: torch.Tensor, taught: TaughtTexts) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """
        Text ids of this rank's texts, `(texts, 1)`, and of all candidates, `(candidates, 1)`, so that a drawn text is
        no negative of itself. A drawn embedding that equals one of the batch is the same text.
        """
        if taught.own_ids is None or taught.all_ids is None:
            return None, None
        drawn_ids = drawn.new_full((len(drawn), 1), NO_TEXT, dtype=taught.all_ids.dtype)
        if len(drawn):
            width = self.teacher_dim
            cosines = truncate(drawn, width, normalize=True) @ truncate(taught.all_teachers, width, normalize=True).T
            closest, row = cosines.max(dim=1)
            drawn_ids = torch.where((closest > SAME_TEXT)[:, None], taught.all_ids[row], drawn_ids)
        return taught.own_ids, torch.cat([taught.all_ids, drawn_ids])
