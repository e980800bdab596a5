"""HSIC of IBKD: an embedding keeps no more of its input than it needs."""

from __future__ import annotations

from typing import Any

import torch

from ..distributed import RankRows
from ..granularity import Granularity, Grid
from ..losses import gram_matrix, hsic
from ..losses.independence import KERNELS
from ..nested import POOLINGS, Pooling, prefix
from ..objective import NestedBatch, Objective


class HSIC(Objective):
    """
    The information bottleneck of IBKD ([2311.05472](https://huggingface.co/papers/2311.05472), Eqs. 6 and 8): the
    dependence of pooled embeddings S on the input X, [`hsic`], at every granularity, summed. The batch is that of all
    ranks; each text column is a sample of its own, and they are averaged: the two sides of a pair are not independent
    draws.

    Args:
        grid ([`Grid`]): The granularities S.
        kernel (`str`, *optional*, defaults to `"rbf"`): `"rbf"`, `"linear"` or `"imq"`; see [`gram_matrix`].
        gamma (`float`, *optional*, defaults to 0.5): Of the kernel (section 4.3).
        input_layer (`int`, *optional*, defaults to 0): X, mean-pooled: 0 for the embedding layer, or a layer below
            those of the grid.
        detach_input (`bool`, *optional*, defaults to `False`): Whether X is without gradient. With it, as in the
            paper's released code, embeddings that say less of the text are a way to less dependence, too.
        normalize (`bool`, *optional*, defaults to `False`): Whether to L2-normalise X and S before the kernel. Without
            it, the squared distances of wide vectors are large, the rbf kernel of any two different texts is nearly 0,
            and so is its gradient.
        pooling (`str`, *optional*, defaults to `"mean"`): Of S, `"mean"` or `"anchor"`.

    Raises:
        ValueError: if an argument is out of range; in forward, for a batch of one.
    """

    name = "hsic"

    def __init__(
        self,
        grid: Grid,
        *,
        kernel: str = "rbf",
        gamma: float = 0.5,
        input_layer: int = 0,
        detach_input: bool = False,
        normalize: bool = False,
        pooling: Pooling = "mean",
    ):
        super().__init__(grid)
        if kernel not in KERNELS:
            raise ValueError(f"hsic_kernel={kernel!r} is unknown; legal values: {', '.join(KERNELS)}.")
        if gamma <= 0:
            raise ValueError(f"hsic_gamma={gamma} must be above 0.")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")
        if not 0 <= input_layer < grid.layers[0]:
            raise ValueError(
                f"hsic_input_layer={input_layer} must be below the layers that are trained ({grid}); 0 is the "
                "embedding layer."
            )
        self.kernel, self.gamma, self.normalize = kernel, gamma, normalize
        self.input_layer, self.detach_input = input_layer, detach_input
        self.student_pooling = pooling
        # X is a mean: where S is not, token states are needed for both.
        self.pooling = pooling if pooling == "mean" else None

    @property
    def reads_token_states(self) -> bool:
        return False

    @property
    def layers(self) -> list[int]:
        return [self.input_layer, *self.grid.layers]

    def gram(self, vectors: torch.Tensor) -> torch.Tensor:
        """The kernel matrix of one sample."""
        vectors = prefix(vectors, vectors.shape[1], normalize=self.normalize)
        return gram_matrix(vectors, self.kernel, gamma=self.gamma)

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        texts = list(batch.texts.values())
        inputs = [text.pooled(self.input_layer, "mean") for text in texts]
        if self.detach_input:
            inputs = [vectors.detach() for vectors in inputs]
        rows = RankRows.of(len(inputs[0]), inputs[0].device)
        if sum(rows.counts) < 2:
            raise ValueError("HSIC is of several texts; there is a batch of one.")
        of_inputs = [self.gram(rows.gather(vectors)) for vectors in inputs]
        losses: dict[Granularity, Any] = {}
        for layer in self.grid.layers:
            pooled = [rows.gather(text.pooled(layer, self.student_pooling)) for text in texts]
            for dim in self.grid.dims_of(layer):
                values = [hsic(x, self.gram(prefix(s, dim))) for x, s in zip(of_inputs, pooled, strict=True)]
                losses[Granularity(layer, dim)] = torch.stack(values).mean()
        return {self.term(g): losses[g] for g in self.grid}
