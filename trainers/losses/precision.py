"""Helpers to compute in float32 where half precision is not accurate enough."""

from __future__ import annotations

import torch


def precise(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 or wider: long sums and small differences are inaccurate in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def no_autocast(tensor: torch.Tensor) -> torch.autocast:
    """A context that disables autocast on the tensor's device, so that products keep the precision of their inputs."""
    return torch.autocast(tensor.device.type, enabled=False)
