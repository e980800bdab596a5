"""HSIC of IBKD: the statistical dependence of an embedding on its input."""

from __future__ import annotations

import torch

from ...encode.granularity import Granularity, Grid
from ...encode.ranks import RankRows
from ...encode.states import Pooling, check_pooling, truncate
from ...utils import papers
from ..core.objective import NestedBatch, Objective, Terms
from .losses import gram_matrix, hsic


class HSIC(Objective):
    """
    The information bottleneck of IBKD ([2311.05472](https://huggingface.co/papers/2311.05472), Eqs. 6 and 8): the
    dependence of pooled embeddings S on the input X, measured by [`hsic`] and summed over granularities. The sample is
    the batch of all ranks. Each text column is a separate sample, because the two texts of a pair are not independent;
    the losses of the columns are averaged, in the second stage those of anchors, positives and negatives, where the
    paper does not say which texts X are. If the embeddings are projected (Eq. 11), S is what is published, the
    projected S'; the paper does not say which of both it means.

    Args:
        grid ([`Grid`]): The granularities of S.
        kernel (`str`, *optional*, defaults to `"rbf"`): `"rbf"`, `"linear"` or `"imq"`; see [`gram_matrix`].
        gamma (`float`, *optional*, defaults to 0.5): Parameter of the kernel (section 4.3).
        input_layer (`int`, *optional*, defaults to 0): Layer of the mean-pooled input X: 0 for the embedding layer, or
            a layer below those of the grid.
        detach_input (`bool`, *optional*, defaults to `False`): Whether to stop the gradient of X. Without a stop, as
            in the paper's released code, the input embeddings can also lower the loss by carrying less information.
        normalize (`bool`, *optional*, defaults to `False`): Whether to L2-normalise X and S before the kernel. Without
            it, the squared distances of wide vectors are large, so the rbf kernel of two different texts and its
            gradient are close to 0.
        pooling (`str`, *optional*, defaults to `"mean"`): Pooling of S: `"mean"`, `"cls"` or `"lasttoken"`.

    Raises:
        ValueError: if an argument is out of range.
    """

    name = "hsic"
    title = "HSIC"
    equation = "IBKD, Eqs. 6 and 8: dependence of the embedding on the input"
    papers = (papers.IBKD,)
    tags = ("ibkd",)

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
        check_pooling(pooling)
        if not 0 <= input_layer < grid.layers[0]:
            raise ValueError(f"input_layer={input_layer} must be below the trained layers of {grid}.")
        self.kernel, self.gamma, self.normalize = kernel, gamma, normalize
        self.input_layer, self.detach_input = input_layer, detach_input
        self.student_pooling = pooling
        # X is mean-pooled. With another pooling of S, the objective needs two poolings, which cannot be cached.
        self.pooling = pooling if pooling == "mean" else None

    @property
    def reads_token_states(self) -> bool:
        return False

    @property
    def layers(self) -> list[int]:
        return [self.input_layer, *self.grid.layers]

    def gram(self, vectors: torch.Tensor) -> torch.Tensor:
        """The kernel matrix of one sample."""
        vectors = truncate(vectors, vectors.shape[1], normalize=self.normalize)
        return gram_matrix(vectors, self.kernel, gamma=self.gamma)

    def forward(self, batch: NestedBatch) -> Terms:
        texts = list(batch.texts.values())
        inputs = [text.pooled(self.input_layer, "mean") for text in texts]
        if self.detach_input:
            inputs = [vectors.detach() for vectors in inputs]
        rows = RankRows.of(len(inputs[0]), inputs[0].device)
        input_grams = [self.gram(rows.gather(vectors)) for vectors in inputs]
        terms: Terms = {}
        for layer in self.grid.layers:
            pooled = [rows.gather(text.pooled(layer, self.student_pooling)) for text in texts]
            for dim in self.grid.dims_of(layer):
                values = [hsic(x, self.gram(truncate(s, dim))) for x, s in zip(input_grams, pooled, strict=True)]
                terms[self.term(Granularity(layer, dim))] = torch.stack(values).mean()
        return terms
