"""The base class of objectives: nested hidden states of a batch in, scalar loss terms out."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

import torch
from torch import nn

from ...encode.granularity import EncoderConfig, Granularity, Grid
from ...encode.states import Pooling, StateKey, TextStates
from ...utils.papers import Identity, Paper


if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Term:
    """
    Identifies one scalar term of a loss.

    Args:
        objective (`str`): Name of the objective, or of the part of a composition.
        granularity ([`Granularity`], *optional*): Granularity of the term; `None` if it has no single one.
        name (`str`, *optional*): Kind of term, for an objective with several kinds.
        weight (`float`, *optional*, defaults to 1.0): Weight of the term in the loss. Terms that differ only in it
            are equal.
    """

    objective: str
    granularity: Granularity | None = None
    name: str = ""
    weight: float = field(default=1.0, compare=False)

    def __str__(self) -> str:
        """Name of the term in the log: `sia_cka_4x64`, `2dmse_align`."""
        return "_".join(str(piece) for piece in (self.objective, self.name, self.granularity) if piece)


Terms = dict[Term, torch.Tensor]
REDUCTIONS = ("sum", "mean")  # of losses over a grid


class TermLog:
    """Means of the terms of a loss since the last [`~TermLog.pop`]. The sums stay on the device until then."""

    def __init__(self) -> None:
        self.sums: dict[Term, torch.Tensor] = {}
        self.count = 0.0

    def add(self, terms: Terms, *, weight: float, count: float) -> None:
        """Add the terms of a batch, times `weight`, which count as `count` steps or rows."""
        for term, value in terms.items():
            self.sums[term] = self.sums.get(term, 0.0) + value * weight
        self.count += count

    def broken(self) -> list[str]:
        """Names of the terms of which a value was not finite. Waits for the device once."""
        finite = torch.isfinite(torch.stack(list(self.sums.values()))).tolist()
        return [str(term) for term, is_finite in zip(self.sums, finite, strict=True) if not is_finite]

    def pop(self, accelerator: Accelerator) -> dict[str, float]:
        """Return name of each term -> mean over steps or rows, and processes, and reset the sums."""
        means = {}
        if self.sums:
            names, sums = list(map(str, self.sums)), list(self.sums.values())
            *sums, count = accelerator.reduce([*sums, sums[0].new_tensor(self.count)], reduction="mean")
            means = {name: (value / count).item() for name, value in zip(names, sums, strict=True)}
        self.sums, self.count = {}, 0.0
        return means


@dataclass(frozen=True)
class NestedBatch:
    """
    Input of an objective: one batch.

    Args:
        texts (`Mapping[str, NestedStates]`): Text column -> hidden states, in the order of the columns.
            [`PooledStates`] if the objective reads only embeddings of one pooling.
        text_ids (`Mapping[str, torch.Tensor]`, *optional*): Text column -> one number per text `(batch,)`; equal
            texts have equal numbers.
        teacher (`Mapping[str, torch.Tensor]`, *optional*): Text column -> the teacher's embeddings of the texts,
            `(batch, teacher_dim)`.
        labels (`torch.Tensor`, *optional*): Labels from the collator.
        output_embeddings (`nn.Module`, *optional*): Vocabulary projection of a backbone with a language-model head.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labelled tokens of the whole optimizer step, over
            all accumulated batches and devices.
    """

    texts: Mapping[str, TextStates]
    text_ids: Mapping[str, torch.Tensor] | None = None
    teacher: Mapping[str, torch.Tensor] | None = None
    labels: torch.Tensor | None = None
    output_embeddings: nn.Module | None = None
    num_items_in_batch: torch.Tensor | int | None = None


class Objective(nn.Module):
    """
    Base class of all objectives. An objective owns its auxiliary parameters (projectors). They are trained with the
    backbone and saved in training checkpoints, but not published with the model.

    Args:
        grid ([`Grid`]): The granularities to train.

    Raises:
        ValueError: if a granularity has a precision.

    Class attributes:
        name (`str`): Name of its terms in the log.
        title (`str`): Name on a model card. Default: name of the class.
        equation (`str`): What the objective computes, with the equation of the paper.
        papers (`tuple[Paper, ...]`): Papers to cite.
        tags (`tuple[str, ...]`): Tags for the Hub.
        normalizes_by_num_items (`bool`): `True` for a sum over tokens, divided by `num_items_in_batch` if that is
            given. `False` for a mean over the batch, which the trainer divides by the accumulation steps.
        needs_full_size (`bool`): `True` if the full depth with all dims is a teacher and must be in the grid.
        pooling (`str`, *optional*): Pooling of an objective that reads only embeddings of one pooling; its gradients
            can be cached. `None` for any other objective.
    """

    name: str = "objective"
    title: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    papers: tuple[Paper, ...] = ()
    tags: ClassVar[tuple[str, ...]] = ()
    normalizes_by_num_items = False
    needs_full_size = False
    pooling: Pooling | None = None

    def __init__(self, grid: Grid):
        super().__init__()
        self.grid = grid.require_float32()

    @classmethod
    def for_grid(cls, grid: Grid, **arguments: Any) -> Self:
        """Build the objective for a model that is trained at `grid`, from arguments of the constructor.
        An objective that uses other granularities (a few layers, a chain) derives them from `grid` here."""
        return cls(grid, **arguments)

    @classmethod
    def argument_names(cls) -> list[str]:
        """Names of the keyword arguments of [`~Objective.for_grid`] and of the constructor."""
        parameters = [p for made in (cls.for_grid, cls) for p in inspect.signature(made).parameters.values()]
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    @property
    def identity(self) -> Identity:
        """Name, equation, papers and tags of this objective."""
        return Identity(self.title or type(self).__name__, self.equation, self.papers, self.tags)

    @property
    def layers(self) -> list[int]:
        """Layers whose hidden states [`forward`] reads ([`nested_states`]). If there are none, the encoder is not
        run."""
        return self.grid.layers

    @property
    def state_keys(self) -> Sequence[StateKey]:
        """The keys that [`forward`] reads: `layers`, and any [`StateOnly`]."""
        return self.layers

    @property
    def reads_token_states(self) -> bool:
        """Whether [`forward`] reads token hidden states, rather than only pooled embeddings."""
        return self.pooling is None

    def validate(self, config: EncoderConfig) -> None:
        """Check that a backbone of this config has the granularities of the objective: ValueError if one is outside
        the model or has a precision, or a required full size is missing from the grid."""
        self.grid.validate(config)
        (full,) = Grid.full_size(config)
        if self.needs_full_size and full not in self.grid:
            raise ValueError(f"The grid {self.grid} needs the full size {full}: it is the teacher of the others.")

    def constrain(self) -> None:
        """Put parameters back into their range, in place. The trainer calls it before each training step, on all parts
        of an objective."""

    def forward(self, batch: NestedBatch) -> Terms:
        """The terms of the loss: scalars, without their weights."""
        raise NotImplementedError(f"{type(self).__name__} must define forward.")

    @final
    def total(self, terms: Mapping[Term, torch.Tensor]) -> torch.Tensor:
        """The loss: the sum of the terms, each multiplied by its weight."""
        values = torch.stack(list(terms.values()))
        return (values * values.new_tensor([term.weight for term in terms])).sum()

    def term(self, granularity: Granularity | None = None, name: str = "", weight: float = 1.0) -> Term:
        """Identifier of a term of this objective, with its weight in the loss."""
        return Term(self.name, granularity, name, weight)


def require_known(legal: Iterable[str], **values: str) -> None:
    """Raise a ValueError that names the argument unless its value is a legal one."""
    for name, value in values.items():
        if value not in legal:
            raise ValueError(f"{name}={value!r} is unknown; legal values: {', '.join(legal)}.")


def require_positive(**values: float) -> None:
    """Raise a ValueError that names the argument unless its value is above 0."""
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name}={value} must be above 0.")
