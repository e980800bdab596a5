"""Granularities and grids: the (layer, dim) sizes of a model, the precisions of stored embeddings, and their text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, total_ordering
from itertools import product
from typing import Any, Protocol

from .precisions import FLOAT, PRECISIONS, precision_of


# Fewest bits first, as layers and dims ascend.
ASCENDING = {name: position for position, name in enumerate(reversed(PRECISIONS))}


class EncoderConfig(Protocol):
    """Fields that are read from the config of any encoder: a [`~transformers.PreTrainedConfig`]."""

    model_type: str
    name_or_path: str
    num_hidden_layers: int
    hidden_size: int
    max_position_embeddings: int
    pad_token_id: int | None
    vocab_size: int

    def to_dict(self) -> dict[str, Any]: ...


def is_elastic(config: EncoderConfig) -> bool:
    """Whether a model of this config is loaded at a size: an m3BERT, or an encoder of an elastic repository."""
    return config.model_type == "m3bert" or bool(getattr(config, "elastic", None))


@total_ordering
@dataclass(frozen=True)
class Granularity:
    """
    One size of an encoder: the hidden state after `layer`, truncated to its first `dim` entries. Written `4x64`. It
    may carry a precision, which is how the numbers are stored: `4x64@int8`. Sorted by layer, dim and bits.

    Args:
        layer (`int`): Depth: the number of layers that run. 0 is the static table.
        dim (`int`): Number of leading dims to keep.
        code (`str`, *optional*, defaults to `"float32"`): One of [`~precisions.PRECISIONS`].

    Raises:
        ValueError: if the precision is unknown.
    """

    layer: int
    dim: int
    code: str = FLOAT

    def __post_init__(self) -> None:
        precision_of(self.code)  # which refuses what is unknown

    @property
    def size(self) -> Granularity:
        """The same layer and dim in float32."""
        return Granularity(self.layer, self.dim)

    def __lt__(self, other: Granularity) -> bool:
        first, second = ((g.layer, g.dim, ASCENDING[g.code]) for g in (self, other))
        return first < second

    def __str__(self) -> str:
        return f"{self.layer}x{self.dim}" + ("" if self.code == FLOAT else f"@{self.code}")

    @classmethod
    def parse(cls, text: str) -> Granularity:
        """Read one granularity, such as `"4x64"` or `"4x64@int8"`."""
        grid = Grid.parse(text)
        if len(grid) != 1:
            raise ValueError(f"{text!r} must be one granularity, such as 4x64.")
        (granularity,) = grid
        return granularity


@dataclass(frozen=True)
class Grid:
    """
    A set of granularities, sorted by layer, then by dim, then by bits.

    Args:
        granularities (`tuple[Granularity, ...]`): The members, in any order.

    Raises:
        ValueError: if the set is empty, a member is repeated, or a layer is below 0 or a dim below 1.

    ```python
    >>> from m3bert.trainers import Grid

    >>> [str(granularity) for granularity in Grid.parse("2,4x32,64")]
    ['2x32', '2x64', '4x32', '4x64']
    >>> str(Grid.parse("12x768, 2x16"))
    '2x16,12x768'
    >>> [str(granularity) for granularity in Grid.parse("4x64@float32,int8")]
    ['4x64@int8', '4x64']
    ```
    """

    granularities: tuple[Granularity, ...]

    def __post_init__(self) -> None:
        members = tuple(sorted(self.granularities))
        if not members:
            raise ValueError("A grid needs at least one granularity.")
        if len(set(members)) < len(members):
            raise ValueError(f"The grid {self._spell(members)} names a granularity twice.")
        if members[0].layer < 0 or min(member.dim for member in members) < 1:
            raise ValueError(f"The grid {self._spell(members)} has a layer below 0 or a dim below 1.")
        object.__setattr__(self, "granularities", members)

    @classmethod
    def product(cls, layers: Iterable[int], dims: Iterable[int], codes: Iterable[str] = (FLOAT,)) -> Grid:
        """The grid of every layer with every dim in every precision."""
        return cls(tuple(Granularity(*member) for member in product(layers, dims, codes)))

    @classmethod
    def parse(cls, text: str) -> Grid:
        """
        Parse a grid. Text with one `x` is the product of two lists: `4,8,12x32,64,768`, or of three with precisions:
        `4,8x32,64@float32,int8`. Text with several is a list of granularities: `2x16,4x32@binary,12x768`. The default
        precision is float32. Spaces are ignored.

        Raises:
            ValueError: if the text has neither form, or a precision is unknown.
        """
        compact = re.sub(r"\s", "", text).lower()
        numbers, code = r"\d+(,\d+)*", r"[a-z][a-z0-9.-]*"
        if re.fullmatch(f"{numbers}x{numbers}(@{code}(,{code})*)?", compact):
            sizes, _, codes = compact.partition("@")
            layers, dims = ([int(number) for number in half.split(",")] for half in sizes.split("x"))
            return cls.product(layers, dims, codes.split(",") if codes else (FLOAT,))
        if re.fullmatch(rf"\d+x\d+(@{code})?(,\d+x\d+(@{code})?)*", compact):
            members = (re.split("[x@]", member) for member in compact.split(","))
            return cls(tuple(Granularity(int(layer), int(dim), *code) for layer, dim, *code in members))
        raise ValueError(
            f"{text!r} is not a grid. Write layers x dims ('4,8,12x32,64,768'), with codes ('12x768@float32,int8'), "
            "or a list of granularities ('2x16,12x768')."
        )

    @classmethod
    def of(cls, config: EncoderConfig) -> Grid:
        """The default grid of a model: the granularities it was trained at. If its config does not name them, every
        layer, or every depth of an elastic model, with 16, 32, 64, ... dims and the hidden size."""
        from ..modeling.configuration_elastic import legal_layers  # not loaded to parse a grid

        layers, dims = (getattr(config, name, None) for name in ("matryoshka_layers", "matryoshka_dims"))
        layers = legal_layers(config) if is_elastic(config) else layers
        depth, width = config.num_hidden_layers, getattr(config, "output_dim", None) or config.hidden_size
        dims = [dim for dim in dims or () if dim <= width] or [2**power for power in range(4, 32) if 2**power < width]
        return cls.product(sorted({*(layers or range(1, depth)), depth}), sorted({*dims, width}))

    @classmethod
    def full_size(cls, config: EncoderConfig) -> Grid:
        """The grid of one granularity: full depth and all dims of a model of this config."""
        return cls((Granularity(config.num_hidden_layers, config.hidden_size),))

    @cached_property
    def layers(self) -> list[int]:
        """Layers of the grid, ascending."""
        return sorted({member.layer for member in self})

    @cached_property
    def dims(self) -> list[int]:
        """Dims of the grid, ascending."""
        return sorted({member.dim for member in self})

    def dims_of(self, layer: int) -> list[int]:
        """Dims of the grid at `layer`, ascending."""
        return sorted({member.dim for member in self if member.layer == layer})

    @cached_property
    def coded(self) -> list[Granularity]:
        """The granularities that are not in float32."""
        return [member for member in self if member.code != FLOAT]

    @cached_property
    def codes(self) -> list[str]:
        """Precisions of the grid, fewest bits first."""
        return sorted({member.code for member in self}, key=ASCENDING.__getitem__)

    @property
    def sizes(self) -> Grid:
        """The grid without precisions: float32 at every layer and dim that a member has. One encode gives them all."""
        return Grid(tuple({member.size for member in self}))

    @property
    def full(self) -> Granularity:
        """The deepest layer at the widest dim, in float32."""
        return Granularity(self.layers[-1], self.dims[-1])

    def require_float32(self) -> Grid:
        """The grid. A ValueError says that a granularity has a precision, which is for stored embeddings only."""
        if self.coded:
            raise ValueError(
                f"{', '.join(map(str, self.coded))}: a model is trained and run in float32. Codes are for stored "
                "embeddings: name them in an evaluation."
            )
        return self

    def validate(self, config: EncoderConfig) -> Grid:
        """The grid. A ValueError says that a model of this config lacks a granularity, or that one has a precision:
        check the [`~Grid.sizes`] of such a grid."""
        self.require_float32()
        depth, width = config.num_hidden_layers, config.hidden_size
        from ..modeling.configuration_elastic import Elasticity  # not loaded to parse a grid

        first = 0 if 0 in Elasticity.of(config).exits else 1
        outside = [str(member) for member in self if not first <= member.layer <= depth or member.dim > width]
        if outside:
            raise ValueError(
                f"The model has layers {first}..{depth} and dims 1..{width}; outside of it: {', '.join(outside)}."
            )
        return self

    def pairs(self, text: str) -> list[tuple[Granularity, Granularity]]:
        """
        Parse teacher-student pairs: `12x768>4x64`, `12x768>4x32,64`, or `12x768>all` (all other granularities of this
        grid). Semicolons separate several pairs.

        Returns:
            `list[tuple[Granularity, Granularity]]`: (student, teacher) of each pair, in the order of the text.

        Raises:
            ValueError: if the text has another form, a granularity is not in the grid, or one teaches itself.
        """
        pairs: list[tuple[Granularity, Granularity]] = []
        for part in text.split(";"):
            left, separator, right = part.partition(">")
            if not separator:
                raise ValueError(f"{part!r} is not a pair. Write teacher>student: '12x768>4x64', '12x768>all'.")
            teacher = Granularity.parse(left)
            everyone = right.strip().lower() == "all"
            students = [g for g in self if g != teacher] if everyone else list(Grid.parse(right))
            if outside := [str(g) for g in (teacher, *students) if g not in self.granularities]:
                raise ValueError(f"{part!r} names granularities that the grid {self} lacks: {', '.join(outside)}.")
            if teacher in students or not students:
                raise ValueError(f"{part!r} makes {teacher} teach itself.")
            pairs += [(student, teacher) for student in students]
        if len(set(pairs)) < len(pairs):
            raise ValueError(f"{text!r} names a pair twice.")
        return pairs

    def __iter__(self) -> Iterator[Granularity]:
        return iter(self.granularities)

    def __len__(self) -> int:
        return len(self.granularities)

    def __str__(self) -> str:
        if len(self) > 1 and Grid.product(self.layers, self.dims, self.codes) == self:
            codes = "" if self.codes == [FLOAT] else f"@{','.join(self.codes)}"
            return f"{','.join(map(str, self.layers))}x{','.join(map(str, self.dims))}{codes}"
        return self._spell(self.granularities)

    @staticmethod
    def _spell(members: Iterable[Granularity]) -> str:
        return ",".join(map(str, members))


def evenly_spaced(values: Sequence[int], count: int) -> list[int]:
    """Up to `count` evenly spaced values, including the last one."""
    count = min(count, len(values))
    return [values[(step + 1) * len(values) // count - 1] for step in range(count)]
