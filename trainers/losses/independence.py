"""Dependence of two samples, measured with kernels."""

from __future__ import annotations

import torch

from ._blocks import no_autocast, precise


KERNELS = ("rbf", "linear", "imq")


def gram_matrix(vectors: torch.Tensor, kernel: str = "rbf", *, gamma: float = 0.5) -> torch.Tensor:
    r"""
    The kernel of every two rows (IBKD, [2311.05472](https://huggingface.co/papers/2311.05472), Eq. 7 and section 4.6):

    - `"rbf"`: `exp(-gamma |x - y|^2)`. The printed Eq. 7 lacks the minus sign and the square; without them it is no
      kernel.
    - `"linear"`: the cosine of x and y, as in the paper's released code; gamma is not used.
    - `"imq"`, inverse multiquadric: `1 / sqrt(|x - y|^2 + gamma)`.

    Args:
        vectors (`torch.Tensor` of shape `(rows, dim)`): Carries gradient.
        kernel (`str`, *optional*, defaults to `"rbf"`): See above.
        gamma (`float`, *optional*, defaults to 0.5): See above; above 0.

    Returns:
        `torch.Tensor` of shape `(rows, rows)`, in float32 at least, also under autocast.

    Raises:
        ValueError: if the kernel is unknown.
    """
    vectors = precise(vectors)
    if kernel == "linear":
        vectors = torch.nn.functional.normalize(vectors, dim=1)
    elif kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is unknown; legal values: {', '.join(KERNELS)}.")
    with no_autocast(vectors):
        products = vectors @ vectors.T
    if kernel == "linear":
        return products
    squares = vectors.square().sum(dim=1)
    # Rounding may leave a distance below 0 by a hair; on the diagonal it is 0, and its gradient as well.
    distances = (squares[:, None] + squares[None, :] - 2 * products).clamp(min=0)
    distances = distances.masked_fill(torch.eye(len(vectors), dtype=torch.bool, device=vectors.device), 0)
    return torch.exp(-gamma * distances) if kernel == "rbf" else (distances + gamma).rsqrt()


def hsic(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """
    The Hilbert-Schmidt independence criterion of two samples, from their kernels (Gretton et al., 2005; IBKD, Eq. 6):
    `tr(K H L H) / n^2` with `H = I - 11^T / n`. Towards 0 for independent samples, and above it for dependent ones.

    Args:
        first (`torch.Tensor` of shape `(n, n)`): K, symmetric. Carries gradient.
        second (`torch.Tensor` of shape `(n, n)`): L, symmetric. Carries gradient.

    Returns:
        scalar `torch.Tensor`
    """
    # tr(K H L H) is the sum of the products of K's entries with those of L, centred over rows and columns.
    centred = second - second.mean(dim=0, keepdim=True) - second.mean(dim=1, keepdim=True) + second.mean()
    return (first * centred).mean()
