"""A student's embeddings learn to say what a teacher's say: IBKD's first term, and its baselines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .distributed import RankRows
from .granularity import Granularity, Grid
from .losses import critic_loss, critic_scores, nested_info_nce
from .losses._blocks import no_autocast, precise
from .losses.contrastive import not_negatives
from .nested import POOLINGS, Pooling, prefix
from .objective import NestedBatch, Objective


@dataclass(frozen=True)
class TaughtTexts:
    """
    The texts of a batch, all columns one after the other, and who is who among those of all ranks.

    Args:
        rows ([`RankRows`]): How they are spread over ranks.
        teacher (`torch.Tensor` of shape `(texts, teacher_dim)`): The teacher's embeddings, without gradient.
        all_teachers (`torch.Tensor` of shape `(texts of all ranks, teacher_dim)`): The same, of all ranks.
        targets (`torch.LongTensor` of shape `(texts,)`): Row of each text among all ranks'.
        own_ids, all_ids (`torch.LongTensor`, *optional*): Text ids `(texts, 1)`, `(texts of all ranks, 1)`.
    """

    rows: RankRows
    teacher: torch.Tensor
    all_teachers: torch.Tensor
    targets: torch.Tensor
    own_ids: torch.Tensor | None = None
    all_ids: torch.Tensor | None = None


class RepresentationDistillation(Objective):
    """
    Base of objectives that draw pooled embeddings to a teacher's, at every granularity of a grid, summed. A text
    column, or each of several, holds texts; whether they are pairs does not matter.

    W, a linear map for each layer, leads from the student's dims to the teacher's; a prefix of d dims uses its first d
    columns. It starts as the identity, where the widths are equal, and as an orthonormal map otherwise, and is
    dropped from what is published.

    Args:
        grid ([`Grid`]): The granularities to train.
        teacher_dim (`int`): Width of the teacher's embeddings.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, or `"anchor"`.

    Raises:
        ValueError: if the pooling is unknown; in forward, if the batch has no teacher's embeddings.
    """

    pooling: Pooling

    def __init__(self, grid: Grid, *, teacher_dim: int, pooling: Pooling = "mean"):
        super().__init__(grid)
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")
        self.teacher_dim, self.pooling = teacher_dim, pooling

    def maps_to(self, dim: int) -> nn.ModuleDict:
        """Layer -> W, `(dim, widest dim of the layer)`."""
        maps = {}
        for layer in self.grid.layers:
            maps[str(layer)] = nn.Linear(self.grid.dims_of(layer)[-1], dim, bias=False)
            weight = maps[str(layer)].weight
            (nn.init.eye_ if weight.shape[0] == weight.shape[1] else nn.init.orthogonal_)(weight)
        return nn.ModuleDict(maps)

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        taught, losses = self.taught(batch), {}
        for layer in self.grid.layers:
            students = torch.cat([text.pooled(layer, self.pooling) for text in batch.texts.values()])
            for dim in self.grid.dims_of(layer):
                g = Granularity(layer, dim)
                losses[g] = taught.rows.mean(self.losses(prefix(students, dim), g, taught))
        return {self.term(g): losses[g] for g in self.grid}

    def losses(self, students: torch.Tensor, granularity: Granularity, taught: TaughtTexts) -> torch.Tensor:
        """The loss of each of this rank's texts, `(texts,)`, from their prefixes `(texts, dim)`."""
        raise NotImplementedError(f"{type(self).__name__} must define losses.")

    def taught(self, batch: NestedBatch) -> TaughtTexts:
        """The teacher's side of a batch; the same for every granularity."""
        if batch.teacher is None:
            raise ValueError(f"{type(self).__name__} needs the teacher's embeddings of the texts: see Teacher.embed.")
        teacher = precise(torch.cat(list(batch.teacher.values()))).detach()
        if teacher.shape[1] != self.teacher_dim:
            raise ValueError(f"The teacher's embeddings have {teacher.shape[1]} dims, not {self.teacher_dim}.")
        rows = RankRows.of(len(teacher), teacher.device)
        targets = torch.arange(len(teacher), device=teacher.device) + rows.offset
        ids = None if batch.text_ids is None else torch.cat(list(batch.text_ids.values()))[:, None]
        all_ids = None if ids is None else rows.gather(ids)
        return TaughtTexts(rows, teacher, rows.gather(teacher), targets, ids, all_ids)


def mapped(students: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """`W s` of prefixes `(texts, dim)`, in float32 at least: what comes out is compared by cosine."""
    with no_autocast(students):
        return nn.functional.linear(precise(students), linear.weight[:, : students.shape[1]])


def squared_errors(students: torch.Tensor, teachers: torch.Tensor, normalize: bool) -> torch.Tensor:
    """Means over dims of squared differences `(texts,)`, of vectors as they are or L2-normalised."""
    sides = (prefix(vectors, vectors.shape[1], normalize=normalize) for vectors in (students, teachers))
    return torch.sub(*sides).square().mean(dim=1)


class TeacherContrast(RepresentationDistillation):
    """
    InfoNCE between `W s` of a text and the teacher's embedding of it, among the teacher's embeddings of the batch, on
    all ranks (IBKD, [2311.05472](https://huggingface.co/papers/2311.05472), Eq. 5, on cosines as its released code).
    By itself it is the paper's CKD; with [`HSIC`], IBKD.

    Args:
        temperature (`float`, *optional*, defaults to 0.1): tau (Table 1).
        mask_duplicates (`bool`, *optional*, defaults to `True`): Equal texts are no negatives of each other.
        kwargs: As for [`RepresentationDistillation`].

    Raises:
        ValueError: as [`RepresentationDistillation`], or if an argument is out of range; in forward, for one text.
    """

    name = "infonce"

    def __init__(self, grid: Grid, *, temperature: float = 0.1, mask_duplicates: bool = True, **kwargs: Any):
        super().__init__(grid, **kwargs)
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} must be above 0.")
        self.temperature, self.mask_duplicates = temperature, mask_duplicates
        self.maps = self.maps_to(self.teacher_dim)

    def losses(self, students: torch.Tensor, granularity: Granularity, taught: TaughtTexts) -> torch.Tensor:
        return nested_info_nce(
            mapped(students, self.maps[str(granularity.layer)]),
            taught.all_teachers,
            dims=(self.teacher_dim,),
            temperature=self.temperature,
            targets=taught.targets,
            anchor_ids=taught.own_ids if self.mask_duplicates else None,
            candidate_ids=taught.all_ids if self.mask_duplicates else None,
        )[:, 0]


class TeacherMSE(RepresentationDistillation):
    """
    Mean squared error between `W s` and the teacher's embedding, over dims and texts: the plain regression that IBKD
    compares itself with.

    Args:
        normalize (`bool`, *optional*, defaults to `False`): Whether to L2-normalise both sides before. Without it the
            student first has to find the length of the teacher's embeddings, which may be far from its own.
        kwargs: As for [`RepresentationDistillation`].
    """

    name = "mse"

    def __init__(self, grid: Grid, *, normalize: bool = False, **kwargs: Any):
        super().__init__(grid, **kwargs)
        self.normalize = normalize
        self.maps = self.maps_to(self.teacher_dim)

    def losses(self, students: torch.Tensor, granularity: Granularity, taught: TaughtTexts) -> torch.Tensor:
        return squared_errors(mapped(students, self.maps[str(granularity.layer)]), taught.teacher, self.normalize)


class CRD(RepresentationDistillation):
    """
    Contrastive representation distillation (Tian et al., [1910.10699](https://huggingface.co/papers/1910.10699), Eqs.
    17 to 19): linear maps of student and teacher to a common space, and a critic that tells pairs from non-pairs, once
    with the student as anchor and once with the teacher. Negatives are those of the batch, on all ranks; the paper's
    memory bank would hold stale embeddings of the student.

    The normaliser of the critic's scores is their mean over the first batch, as in the paper's released code.

    Args:
        critic_dim (`int`, *optional*, defaults to 128): Dims of the common space.
        temperature (`float`, *optional*, defaults to 0.07): tau.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Equal texts are no negatives of each other.
        kwargs: As for [`RepresentationDistillation`].

    Raises:
        ValueError: as [`RepresentationDistillation`], or if an argument is out of range.
    """

    name = "crd"

    def __init__(
        self,
        grid: Grid,
        *,
        critic_dim: int = 128,
        temperature: float = 0.07,
        mask_duplicates: bool = True,
        **kwargs: Any,
    ):
        super().__init__(grid, **kwargs)
        if temperature <= 0 or critic_dim < 1:
            raise ValueError(f"CRD needs values above 0: critic_dim={critic_dim}, temperature={temperature}.")
        self.temperature, self.mask_duplicates = temperature, mask_duplicates
        self.maps = self.maps_to(critic_dim)
        self.teacher_map = nn.Linear(self.teacher_dim, critic_dim, bias=False)
        nn.init.orthogonal_(self.teacher_map.weight)
        for granularity in grid:
            self.register_buffer(f"log_normalizer_{granularity}", torch.tensor(torch.nan))

    def losses(self, students: torch.Tensor, granularity: Granularity, taught: TaughtTexts) -> torch.Tensor:
        students = mapped(students, self.maps[str(granularity.layer)])
        teachers = mapped(taught.teacher, self.teacher_map)
        left_out = None
        if self.mask_duplicates:
            left_out = not_negatives(taught.own_ids, taught.all_ids, taught.targets)
        total = torch.zeros(len(students), dtype=students.dtype, device=students.device)
        for anchors, candidates in ((students, teachers), (teachers, students)):
            scores = critic_scores(anchors, taught.rows.gather(candidates), temperature=self.temperature)
            normalizer = self.log_normalizer(granularity, scores, taught.rows)
            total = total + critic_loss(scores, taught.targets, log_normalizer=normalizer, left_out=left_out)
        return total

    @torch.no_grad()
    def log_normalizer(self, granularity: Granularity, scores: torch.Tensor, rows: RankRows) -> torch.Tensor:
        """log Z: of the first batch of all ranks, from then on the same."""
        known = getattr(self, f"log_normalizer_{granularity}")
        if known.isnan():
            known.copy_(rows.gather(scores.detach()).logsumexp(dim=(0, 1)) - 2 * math.log(scores.shape[1]))
        return known


class HPD(RepresentationDistillation):
    """
    Homomorphic projective distillation (Zhao et al., [2203.07687](https://huggingface.co/papers/2203.07687)): mean
    squared error between the student's embedding, which has a projection of its own to few dims, and the teacher's
    first principal components.

    Args:
        components (`torch.Tensor` of shape `(dim, teacher_dim)`): See [`TeacherEmbeddings.principal_components`]. The
            grid has one granularity, of so many dims.
        normalize (`bool`, *optional*, defaults to `False`): See [`TeacherMSE`].
        kwargs: As for [`RepresentationDistillation`].

    Raises:
        ValueError: as [`RepresentationDistillation`], or if the grid is another.
    """

    name = "hpd"

    def __init__(self, grid: Grid, *, components: torch.Tensor, normalize: bool = False, **kwargs: Any):
        super().__init__(grid, **kwargs)
        self.normalize = normalize
        if len(grid) != 1 or grid.dims != [len(components)]:
            raise ValueError(f"HPD trains one granularity of {len(components)} dims; the grid is {grid}.")
        self.components: torch.Tensor
        self.register_buffer("components", components)

    def losses(self, students: torch.Tensor, granularity: Granularity, taught: TaughtTexts) -> torch.Tensor:
        with no_autocast(students):
            targets = taught.teacher @ self.components.T.to(taught.teacher)
        return squared_errors(precise(students), targets, self.normalize)
