"""Terms of an objective that has several parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def weighted_sum(terms: Mapping[str, torch.Tensor], weights: Mapping[str, float]) -> torch.Tensor:
    """Sum of terms that are named `{objective}_{part}_{granularity}`, each counted with the weight of its part."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, term in terms.items():
        parts.setdefault(name.split("_")[1], []).append(term)
    return torch.stack([weights[part] * torch.stack(values).sum() for part, values in parts.items()]).sum()
