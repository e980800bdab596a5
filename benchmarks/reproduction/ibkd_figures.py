"""Figures of IBKD's paper: covariances of dims, and alignment against uniformity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hub_cards.figures import blank_figure, save
from hub_cards.labels import label_points


def draw_covariances(covariances: Mapping[str, np.ndarray], file: Path, dims: int = 16) -> None:
    """
    Absolute covariances of the first dims of several encoders, side by side (IBKD, Figure 4). Each is divided by the
    encoder's mean variance, so that longer embeddings alone do not look more correlated.

    Args:
        covariances (`Mapping[str, np.ndarray]`): Name of an encoder -> its covariances `(width, width)`.
        file (`Path`): PNG file to write.
        dims (`int`, *optional*, defaults to 16): Number of dims to show.
    """
    figure = blank_figure(1.4 + 2.9 * len(covariances), 3.6)
    panels = figure.subplots(1, len(covariances), squeeze=False)[0]
    for axes, (name, covariance) in zip(panels, covariances.items(), strict=True):
        scaled = abs(covariance) * len(covariance) / covariance.trace()
        image = axes.imshow(
            scaled[:dims, :dims], cmap="Blues", vmin=0, vmax=1, extent=(0.5, dims + 0.5, dims + 0.5, 0.5)
        )
        others = (scaled.sum() - scaled.trace()) / (len(scaled) * (len(scaled) - 1))
        axes.set_title(f"{name}\nmean off the diagonal, all dims {others:.3f}", fontsize="small")
        axes.set_xlabel("dim")
    figure.colorbar(image, ax=panels, label="|covariance| / mean variance")
    save(figure, file)


def draw_alignment_and_uniformity(points: Mapping[str, tuple[float, float]], file: Path) -> None:
    """
    Alignment of positive pairs against uniformity (IBKD, Figure 5). Lower is better for both.

    Args:
        points (`Mapping[str, tuple[float, float]]`): Name of an encoder -> its uniformity and alignment.
        file (`Path`): PNG file to write.
    """
    figure = blank_figure(7.6, 4.8)
    axes = figure.subplots()
    axes.plot(*zip(*points.values(), strict=True), "o", markersize=4)
    axes.margins(0.1)
    axes.set_xlabel("uniformity (lower: texts spread)")
    axes.set_ylabel("alignment (lower: pairs close)")
    axes.grid(alpha=0.3)
    figure.draw_without_rendering()  # the layout is known from here on
    label_points(axes, list(points.values()), list(points))
    save(figure, file)
