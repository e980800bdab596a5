"""Labels at the points of a figure: none hides another label or a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainers.core.extras import require_extra


if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIRECTIONS = 16  # that are tried at each distance
STEP, STEPS = 4, 16  # points of type between two distances, and their number
ATTACHED = 1  # steps up to which a label needs no line to its point
RADIUS = 4.5  # of a point, in points of type


class Box(NamedTuple):
    """A rectangle."""

    left: float
    bottom: float
    right: float
    top: float

    @classmethod
    def around(cls, x: float, y: float, width: float, height: float) -> Box:
        """The rectangle with this center and these half sides."""
        return cls(x - width, y - height, x + width, y + height)

    def shared(self, other: Box) -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)


def label_points(axes: Axes, points: Sequence[tuple[float, float]], labels: Sequence[str], size: float = 6.5) -> None:
    """
    Write a label beside each point of a panel, at the nearest place where it covers no point and no other label, with
    a line to its point if it does not touch it. If there is no such place, it covers as little as possible.

    Args:
        axes (`~matplotlib.axes.Axes`): Panel, in its final size, scales and limits.
        points (`Sequence[tuple[float, float]]`): Place of each point, in the units of the panel.
        labels (`Sequence[str]`): One label per point.
        size (`float`, *optional*, defaults to 6.5): Size of the type in points.
    """
    effects = require_extra("matplotlib.patheffects", "publish", "A figure")
    halo = [effects.withStroke(linewidth=1.5, foreground="white")]  # over lines
    pixels = axes.figure.dpi / 72
    panel = Box(*(value / pixels for value in axes.get_window_extent().extents))
    places = [(x / pixels, y / pixels) for x, y in axes.transData.transform(list(points))]
    taken = [Box.around(*place, RADIUS, RADIUS) for place in places]
    for place, point, label in zip(places, points, labels, strict=True):
        style: dict[str, Any] = {"fontsize": size, "ha": "center", "va": "center"}
        measured = axes.text(0, 0, label, **style)
        extent = measured.get_window_extent()
        measured.remove()
        width, height = extent.width / pixels / 2 + 0.5, extent.height / pixels / 2
        step, right, up = min(
            _offsets(width, height), key=lambda at: _hidden(at, place, (width, height), taken, panel)
        )
        taken.append(Box.around(place[0] + right, place[1] + up, width, height))
        line = {"arrowstyle": "-", "color": "grey", "linewidth": 0.5, "shrinkA": 0, "shrinkB": RADIUS}
        text = axes.annotate(
            label,
            point,
            (right, up),
            textcoords="offset points",
            arrowprops=line if step > ATTACHED else None,
            path_effects=halo,
            **style,
        )
        text.set_in_layout(False)


def _offsets(width: float, height: float) -> list[tuple[int, float, float]]:
    """Distance in steps, and places of the center of a label with these half sides from its point, nearest first."""
    return [
        (
            step,
            math.cos(angle) * (RADIUS + STEP * step / 2 + width),
            math.sin(angle) * (RADIUS + STEP * step / 2 + height),
        )
        for step in range(STEPS)
        for angle in (2 * math.pi * turn / DIRECTIONS for turn in range(DIRECTIONS))
    ]


def _hidden(
    at: tuple[int, float, float],
    place: tuple[float, float],
    sides: tuple[float, float],
    taken: Sequence[Box],
    panel: Box,
) -> float:
    """The area that a label would hide at an offset of its point, or that would be outside of the panel."""
    box = Box.around(place[0] + at[1], place[1] + at[2], *sides)
    outside = 4 * sides[0] * sides[1] - box.shared(panel)
    return round(sum(map(box.shared, taken)) + outside, 1)  # of places that are equally good, the nearest
