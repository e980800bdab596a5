"""Running means of the terms of a loss, for the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .objective import Term


class TermMeter:
    """Running means of terms. The sums stay on the device until [`pop`] reads them."""

    def __init__(self) -> None:
        self.sums: dict[Term, torch.Tensor] = {}
        self.count = 0
        self.last_step: int | None = None

    def add(self, terms: Mapping[Term, torch.Tensor], scale: float = 1.0, step: int | None = None) -> None:
        """Add terms. All calls with the same `step` (its accumulated batches) count as one."""
        for term, value in terms.items():
            self.sums[term] = self.sums.get(term, 0.0) + value * scale
        if step is None or step != self.last_step:
            self.count += 1
        self.last_step = step

    def pop(self, accelerator: Any) -> dict[str, float]:
        """Return name of each term -> mean over steps and processes, and reset the sums."""
        reduced = accelerator.reduce(self.sums, reduction="mean") if self.sums else {}
        means = {str(term): (value / self.count).item() for term, value in reduced.items()}
        self.sums, self.count, self.last_step = {}, 0, None
        return means
