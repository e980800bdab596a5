"""Distillation of a teacher's embeddings: the first term of IBKD, and its baselines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...encode.granularity import Granularity, Grid
from ...encode.ranks import RankRows
from ...encode.states import Pooling, check_pooling, truncate
from ...utils import papers
from ...utils.numerics import cosine_matrix, no_autocast, precise
from ..core.objective import NestedBatch, Objective, Terms, require_positive
from ..embedding.info_nce import false_negatives, nested_info_nce


@dataclass(frozen=True)
class TaughtTexts:
    """
    The teacher's embeddings of a batch, with all text columns concatenated.

    Args:
        teacher (`torch.Tensor` of shape `(texts, teacher_dim)`): Those of this rank, without gradient.
        all_teachers (`torch.Tensor` of shape `(texts of all ranks, teacher_dim)`): Those of all ranks.
        targets (`torch.LongTensor` of shape `(texts,)`): Row of each text in `all_teachers`.
        own_ids (`torch.LongTensor` of shape `(texts, 1)`, *optional*): Text ids on this rank.
        all_ids (`torch.LongTensor` of shape `(texts of all ranks, 1)`, *optional*): Text ids on all ranks.
    """

    rows: RankRows
    teacher: torch.Tensor
    all_teachers: torch.Tensor
    targets: torch.Tensor
    own_ids: torch.Tensor | None = None
    all_ids: torch.Tensor | None = None


class RepresentationDistillation(Objective):
    """
    Base class of objectives that match pooled embeddings to a teacher's, summed over the granularities of a grid. The
    texts come from one or more text columns and need not be pairs.

    W, one linear map per layer, maps the student's dims to the teacher's. A prefix of d dims uses the first d columns
    of W. W is initialised as the identity if the dims are equal, and as an orthonormal map otherwise. It is not
    published.

    Args:
        grid ([`Grid`]): The granularities to train.
        teacher_dim (`int`): Dims of the teacher's embeddings.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, `"cls"` or `"lasttoken"`.

    Raises:
        ValueError: if the pooling is unknown; in forward, if the batch has no embeddings of a teacher, or of other
            dims.
    """

    pooling: Pooling
    tags: ClassVar[tuple[str, ...]] = ("distillation", "sentence-similarity")

    def __init__(self, grid: Grid, *, teacher_dim: int, pooling: Pooling = "mean"):
        super().__init__(grid)
        check_pooling(pooling)
        self.teacher_dim, self.pooling = teacher_dim, pooling

    def maps_to(self, dim: int) -> nn.ModuleDict:
        """Layer -> W of shape `(dim, widest dim of the layer)`."""
        maps = {}
        for layer in self.grid.layers:
            maps[str(layer)] = nn.Linear(self.grid.dims_of(layer)[-1], dim, bias=False)
            weight = maps[str(layer)].weight
            (nn.init.eye_ if weight.shape[0] == weight.shape[1] else nn.init.orthogonal_)(weight)
        return nn.ModuleDict(maps)

    def forward(self, batch: NestedBatch) -> Terms:
        taught, terms = self.taught(batch), {}
        for layer in self.grid.layers:
            students = torch.cat([text.pooled(layer, self.pooling) for text in batch.texts.values()])
            for dim in self.grid.dims_of(layer):
                g = Granularity(layer, dim)
                terms[self.term(g)] = taught.rows.mean(self.losses(truncate(students, dim), g, taught))
        return terms

    def losses(self, students: torch.Tensor, granularity: Granularity, taught: TaughtTexts) -> torch.Tensor:
        """The loss of each text of this rank, `(texts,)`, from prefixes `(texts, dim)`."""
        raise NotImplementedError(f"{type(self).__name__} must define losses.")

    def taught(self, batch: NestedBatch) -> TaughtTexts:
        """The teacher's embeddings of a batch, which are the same for every granularity."""
        if batch.teacher is None:
            raise ValueError(f"{type(self).__name__} needs a teacher's embeddings of the texts in `batch.teacher`.")
        teacher = precise(torch.cat(list(batch.teacher.values()))).detach()
        if teacher.shape[1] != self.teacher_dim:
            raise ValueError(
                f"The teacher's embeddings have {teacher.shape[1]} dims, but teacher_dim={self.teacher_dim}."
            )
        rows = RankRows.of(len(teacher), teacher.device)
        targets = torch.arange(len(teacher), device=teacher.device) + rows.offset
        ids = None if batch.text_ids is None else torch.cat(list(batch.text_ids.values()))[:, None]
        all_ids = None if ids is None else rows.gather(ids)
        return TaughtTexts(rows, teacher, rows.gather(teacher), targets, ids, all_ids)


def mapped(students: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    """`W s` of prefixes `(texts, dim)`, in float32 or wider, because the result is compared by cosine."""
    weight: Any = linear.weight
    with no_autocast(students):
        return nn.functional.linear(precise(students), precise(weight[:, : students.shape[1]]))


def squared_errors(students: torch.Tensor, teachers: torch.Tensor, normalize: bool) -> torch.Tensor:
    """Mean squared differences over dims, `(texts,)`, of vectors that are L2-normalised if `normalize`."""
    sides = (truncate(vectors, vectors.shape[1], normalize=normalize) for vectors in (students, teachers))
    return torch.sub(*sides).square().mean(dim=1)


class TeacherContrast(RepresentationDistillation):
    """
    InfoNCE between `W s` of a text and the teacher's embedding of the same text, against the teacher's embeddings of
    all texts on all ranks (IBKD, [2311.05472](https://huggingface.co/papers/2311.05472), Eq. 5, with cosines as in the
    released code). With [`HSIC`], it is the first stage of IBKD. Alone, it is the first stage of the paper's baseline
    CKD. The positive is in the denominator once; as printed, Eq. 5 has it there twice.

    Args:
        temperature (`float`, *optional*, defaults to 0.1): tau; cosines are divided by it (Table 1).
        mask_duplicates (`bool`, *optional*, defaults to `True`): Do not use equal texts as negatives of each other.
        kwargs: Arguments of [`RepresentationDistillation`].

    Raises:
        ValueError: as [`RepresentationDistillation`], or if an argument is out of range; in forward, for a batch of
            one text.
    """

    name = "infonce"
    title = "InfoNCE with a teacher"
    equation = "IBKD, Eq. 5: InfoNCE with a teacher's embeddings"
    papers = (papers.IBKD,)
    tags = ("ibkd", "distillation", "sentence-similarity")

    def __init__(self, grid: Grid, *, temperature: float = 0.1, mask_duplicates: bool = True, **kwargs: Any):
        super().__init__(grid, **kwargs)
        require_positive(temperature=temperature)
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
    Mean squared error between `W s` and the teacher's embedding, over dims and texts: the regression baseline of IBKD.

    Args:
        normalize (`bool`, *optional*, defaults to `False`): Whether to L2-normalise both sides first. Without it, the
            student must also learn the norm of the teacher's embeddings, which may differ greatly from its own.
        kwargs: Arguments of [`RepresentationDistillation`].
    """

    name = "mse"
    title = "MSE to a teacher"
    equation = "mean squared error to a teacher's embeddings"
    papers = ()

    def __init__(self, grid: Grid, *, normalize: bool = False, **kwargs: Any):
        super().__init__(grid, **kwargs)
        self.normalize = normalize
        self.maps = self.maps_to(self.teacher_dim)

    def losses(self, students: torch.Tensor, granularity: Granularity, taught: TaughtTexts) -> torch.Tensor:
        return squared_errors(mapped(students, self.maps[str(granularity.layer)]), taught.teacher, self.normalize)


class CRD(RepresentationDistillation):
    """
    Contrastive representation distillation (Tian et al., [1910.10699](https://huggingface.co/papers/1910.10699), Eqs.
    17 to 19): linear maps of student and teacher to a common space, and a critic that separates pairs from non-pairs,
    once with the student as anchor and once with the teacher. Negatives come from the batch of all ranks. The memory
    bank of the paper would hold outdated embeddings of the student.

    The normaliser of the critic's scores is their mean over the first batch, as in the paper's released code.

    Args:
        critic_dim (`int`, *optional*, defaults to 128): Dims of the common space.
        temperature (`float`, *optional*, defaults to 0.07): tau; cosines are divided by it.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Do not use equal texts as negatives of each other.
        kwargs: Arguments of [`RepresentationDistillation`].
    """

    name = "crd"
    title = "CRD"
    equation = "CRD, Eqs. 17 to 19: contrast with a teacher's embeddings by a learned critic"
    papers = (papers.CRD,)

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
        self.temperature, self.mask_duplicates = temperature, mask_duplicates
        self.maps = self.maps_to(critic_dim)
        self.teacher_map = nn.Linear(self.teacher_dim, critic_dim, bias=False)
        nn.init.orthogonal_(self.teacher_map.weight)
        self._normalized: set[Granularity] = set()  # known without a look at the device
        for granularity in grid:
            self.register_buffer(f"log_normalizer_{granularity}", torch.tensor(torch.nan))

    def losses(self, students: torch.Tensor, granularity: Granularity, taught: TaughtTexts) -> torch.Tensor:
        students = mapped(students, self.maps[str(granularity.layer)])
        teachers = mapped(taught.teacher, self.teacher_map)
        left_out = None
        if self.mask_duplicates and taught.own_ids is not None and taught.all_ids is not None:
            left_out = false_negatives(taught.own_ids, taught.all_ids, taught.targets)
        total = torch.zeros(len(students), dtype=students.dtype, device=students.device)
        for anchors, candidates in ((students, teachers), (teachers, students)):
            scores = cosine_matrix(anchors, taught.rows.gather(candidates)) / self.temperature
            normalizer = self.log_normalizer(granularity, scores, taught.rows)
            total = total + critic_loss(scores, taught.targets, log_normalizer=normalizer, left_out=left_out)
        return total

    @torch.no_grad()
    def log_normalizer(self, granularity: Granularity, scores: torch.Tensor, rows: RankRows) -> torch.Tensor:
        """log Z: the log of the mean exponentiated score over the first batch of all ranks; constant afterwards."""
        known = getattr(self, f"log_normalizer_{granularity}")
        if granularity not in self._normalized and known.isnan():
            known.copy_(rows.gather(scores.detach()).logsumexp(dim=(0, 1)) - 2 * math.log(scores.shape[1]))
        self._normalized.add(granularity)
        return known


def critic_loss(
    scores: torch.Tensor, targets: torch.Tensor, *, log_normalizer: torch.Tensor, left_out: torch.Tensor | None = None
) -> torch.Tensor:
    r"""
    Noise-contrastive loss of CRD's critic (Tian et al., [1910.10699](https://huggingface.co/papers/1910.10699), Eqs.
    17 to 19). With `x = exp(score) / Z`, where Z makes x 1 on average, and N negatives, the critic predicts "pair"
    with probability `h = x / (x + N)`. The loss of an anchor is `-log h(positive) - sum_negatives log(1 -
    h(negative))`. The size of the data set in the paper's Eq. 19 cancels because x is normalised, as in the released
    code.

    Args:
        scores (`torch.Tensor` of shape `(anchors, candidates)`): Cosines divided by the temperature. Carries
            gradient.
        targets (`torch.LongTensor` of shape `(anchors,)`): Index of each anchor's positive among the candidates.
        log_normalizer (scalar `torch.Tensor`): log Z.
        left_out (`torch.Tensor` of shape `(anchors, candidates)`, *optional*): Mask of candidates that are not used as
            negatives.

    Returns:
        `torch.Tensor` of shape `(anchors,)`
    """
    logits = scores - log_normalizer - math.log(max(1, scores.shape[1] - 1))
    negative_losses = nn.functional.softplus(logits)
    if left_out is not None:
        negative_losses = negative_losses.masked_fill(left_out, 0)
    positives = logits.gather(1, targets[:, None])[:, 0]
    positive_as_negative = nn.functional.softplus(positives)
    # log h = -softplus(-logit). The sum over candidates includes the positive, which is subtracted.
    return nn.functional.softplus(-positives) + negative_losses.sum(dim=1) - positive_as_negative


class HPD(RepresentationDistillation):
    """
    Homomorphic projective distillation (Zhao et al., [2203.07687](https://huggingface.co/papers/2203.07687)): mean
    squared error between the student's projected embedding and the first principal components of the teacher's.

    Args:
        components (`torch.Tensor` of shape `(dim, teacher_dim)`): See [`TeacherEmbeddings.principal_components`]. The
            grid must have one granularity with `dim` dims.
        normalize (`bool`, *optional*, defaults to `False`): See [`TeacherMSE`].
        kwargs: Arguments of [`RepresentationDistillation`].

    Raises:
        ValueError: as [`RepresentationDistillation`], or if the grid does not fit the components.
    """

    name = "hpd"
    title = "HPD"
    equation = "HPD: mean squared error to a teacher's principal components"
    papers = (papers.HPD,)

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
