"""Statistical dependence of two samples, measured with kernels."""

from __future__ import annotations

import torch

from ...utils.numerics import no_autocast, precise


def gram_matrix(vectors: torch.Tensor, kernel: str = "rbf", *, gamma: float = 0.5) -> torch.Tensor:
    r"""
    The kernel of all pairs of rows (IBKD, [2311.05472](https://huggingface.co/papers/2311.05472), Eq. 7 and section
    4.6):

    - `"rbf"`: `exp(-gamma |x - y|^2)`. Eq. 7 is printed without the minus sign and the square, which a kernel needs.
    - `"linear"`: the cosine of x and y, as in the paper's released code; gamma is not used.
    - `"imq"`, inverse multiquadric: `1 / sqrt(|x - y|^2 + gamma)`.

    Args:
        vectors (`torch.Tensor` of shape `(rows, dim)`): Vectors of one sample. Carries gradient.
        kernel (`str`, *optional*, defaults to `"rbf"`): `"rbf"`, `"linear"` or `"imq"`.
        gamma (`float`, *optional*, defaults to 0.5): Parameter of the kernel, above 0.

    Returns:
        `torch.Tensor` of shape `(rows, rows)`, in float32 or wider, also under autocast.

    Raises:
        ValueError: if the kernel is unknown.
    """
    vectors = precise(vectors)
    if kernel == "linear":
        vectors = torch.nn.functional.normalize(vectors, dim=1)
    elif kernel not in ("rbf", "imq"):
        raise ValueError(f"kernel={kernel!r} is unknown; legal values: rbf, linear, imq.")
    with no_autocast(vectors):
        products = vectors @ vectors.T
    if kernel == "linear":
        return products
    squares = vectors.square().sum(dim=1)
    # Rounding errors may make a distance slightly negative. The diagonal is 0, without gradient.
    distances = (squares[:, None] + squares[None, :] - 2 * products).clamp(min=0)
    distances = distances.masked_fill(torch.eye(len(vectors), dtype=torch.bool, device=vectors.device), 0)
    return torch.exp(-gamma * distances) if kernel == "rbf" else (distances + gamma).rsqrt()


def hsic(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """
    The Hilbert-Schmidt independence criterion of two samples, from their kernel matrices (Gretton et al., 2005; IBKD,
    Eq. 6): `tr(K H L H) / n^2` with `H = I - 11^T / n`. Close to 0 for independent samples, larger for dependent ones.

    Args:
        first (`torch.Tensor` of shape `(n, n)`): K, symmetric. Carries gradient.
        second (`torch.Tensor` of shape `(n, n)`): L, symmetric. Carries gradient.

    Returns:
        scalar `torch.Tensor`
    """
    # tr(K H L H) is the sum of the elementwise product of K and H L H, which is L centred over rows and columns.
    centred = second - second.mean(dim=0, keepdim=True) - second.mean(dim=1, keepdim=True) + second.mean()
    return (first * centred).mean()
