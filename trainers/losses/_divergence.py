"""KL divergences between the predictions of a masked-LM head at pairs of granularities, computed block by block over
the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .common import Buffers


Node = tuple[int, int]  # (index of a layer, index of a dim)


@dataclass(frozen=True)
class Divergences:
    """
    The pairs of distributions to compare, and the kind of divergence.

    Args:
        pairs (`tuple[tuple[Node, Node], ...]`): Pairs (student, teacher).
        tokens (`int`): Number of rows per layer. The rows of layer i are `i * tokens` to `(i + 1) * tokens`.
        reverse (`bool`, *optional*, defaults to `True`): Whether to compute KL(student || teacher) rather than
            KL(teacher || student).
        temperature (`float`, *optional*, defaults to 1.0): Scores are divided by it.
    """

    pairs: tuple[tuple[Node, Node], ...]
    tokens: int
    reverse: bool = True
    temperature: float = 1.0

    @property
    def nodes(self) -> list[Node]:
        """All nodes of the pairs, sorted."""
        return sorted({node for pair in self.pairs for node in pair})

    def rows(self, node: Node) -> slice:
        """Rows of the node's layer."""
        return slice(node[0] * self.tokens, (node[0] + 1) * self.tokens)

    def of_dim(self, index: int) -> Iterator[tuple[int, slice]]:
        """Yield number and rows of each node with this dim."""
        for number, node in enumerate(self.nodes):
            if node[1] == index:
                yield number, self.rows(node)

    def numbered(self) -> list[tuple[int, int]]:
        """The pairs, with each node replaced by its number in `nodes`."""
        nodes = self.nodes
        return [(nodes.index(student), nodes.index(teacher)) for student, teacher in self.pairs]


class RunningDivergences:
    """
    The values of the divergences, computed in one pass over blocks of scores. With scores s_p and s_q,
    `KL(p || q) = E_p[s_p - s_q] - logsumexp(s_p) + logsumexp(s_q)`: a running mean and two running sums, as in an
    online softmax.

    Args:
        divergences ([`Divergences`]): The pairs.
        like (`torch.Tensor`): A tensor with the device and the dtype of the results.
        block_size (`int`): Largest number of vocabulary entries per block.
    """

    def __init__(self, divergences: Divergences, like: torch.Tensor, block_size: int) -> None:
        self.divergences, self.pairs = divergences, divergences.numbered()
        self.log_sums = like.new_full((len(divergences.nodes), divergences.tokens), -torch.inf)
        self.block_log_sums = torch.empty_like(self.log_sums)
        self.means = like.new_zeros((len(self.pairs), divergences.tokens))
        self.buffers = Buffers(like, len(divergences.nodes) + 2, divergences.tokens * block_size, like.dtype)

    def keep(self, index: int, scores: torch.Tensor, log_sums: torch.Tensor) -> None:
        """Store the scores `(rows, block)` of one dim, and the log-sum-exp of each row `(rows,)`."""
        nodes, temperature = self.buffers.of(self.divergences.tokens, scores.shape[1]), self.divergences.temperature
        for number, rows in self.divergences.of_dim(index):
            if temperature == 1:
                nodes[number].copy_(scores[rows])
                self.block_log_sums[number] = log_sums[rows]
            else:
                torch.div(scores[rows], temperature, out=nodes[number])
                self.block_log_sums[number] = torch.logsumexp(nodes[number], dim=1)

    def add_block(self, width: int, excluded: torch.Tensor | None) -> None:
        """Add the stored block to the running means and sums. `excluded` is a mask of entries with a bias of -inf."""
        *nodes, powers, differences = self.buffers.of(self.divergences.tokens, width)
        previous_log_sums = self.log_sums.clone()
        # Finite even if a whole block is excluded.
        block_log_sums = self.block_log_sums.clamp(min=torch.finfo(previous_log_sums.dtype).min)
        self.log_sums = torch.logaddexp(self.log_sums, block_log_sums)
        current = None  # the node whose probabilities are in `powers`
        for pair, (student, teacher) in enumerate(self.pairs):
            p, q = (student, teacher) if self.divergences.reverse else (teacher, student)
            if p != current:
                torch.sub(nodes[p], block_log_sums[p, :, None], out=powers).exp_()
                current = p
            torch.sub(nodes[p], nodes[q], out=differences)
            if excluded is not None:
                differences[:, excluded] = 0
            mean = torch.linalg.vecdot(powers, differences)
            self.means[pair] *= (previous_log_sums[p] - self.log_sums[p]).exp()
            self.means[pair] += mean * (block_log_sums[p] - self.log_sums[p]).exp()

    def values(self) -> torch.Tensor:
        """The divergences, `(pairs, tokens)`."""
        sign = 1 if self.divergences.reverse else -1
        gaps = [self.log_sums[teacher] - self.log_sums[student] for student, teacher in self.pairs]
        return self.means + sign * torch.stack(gaps)


class DivergenceGradients:
    """
    The gradients of the divergences with respect to the students' scores, block by block. Teachers get no gradient.

    Args:
        divergences ([`Divergences`]): The pairs.
        log_sums (`torch.Tensor` of shape `(nodes, tokens)`): Log-sum-exp of the scores of each node.
        values (`torch.Tensor` of shape `(pairs, tokens)`): The divergences.
        grads (`torch.Tensor` of shape `(pairs, tokens)`): Gradients of the loss with respect to the divergences.
        block_size (`int`): Largest number of vocabulary entries per block.
    """

    def __init__(
        self,
        divergences: Divergences,
        log_sums: torch.Tensor,
        values: torch.Tensor,
        grads: torch.Tensor,
        block_size: int,
    ) -> None:
        self.divergences, self.pairs = divergences, divergences.numbered()
        self.log_sums, self.values, self.grads = log_sums, values, grads / divergences.temperature
        self.buffers = Buffers(values, len(divergences.nodes) + 2, divergences.tokens * block_size, values.dtype)

    def keep(self, index: int, scores: torch.Tensor) -> None:
        """Store the log-probabilities of one dim, from its scores `(rows, block)`."""
        nodes = self.buffers.of(self.divergences.tokens, scores.shape[1])
        for number, rows in self.divergences.of_dim(index):
            scaled = scores[rows]
            if self.divergences.temperature != 1:
                scaled = torch.div(scaled, self.divergences.temperature, out=nodes[number])
            torch.sub(scaled, self.log_sums[number, :, None], out=nodes[number])

    def add_to(self, gradients: Sequence[torch.Tensor], excluded: torch.Tensor | None) -> None:
        """Add the gradients of the stored block to `gradients`: one tensor `(rows, block)` per dim."""
        *nodes, ratios, probabilities = self.buffers.of(self.divergences.tokens, gradients[0].shape[1])
        students = [student for student, _ in self.divergences.pairs]
        for pair, ((layer, dim), (student, teacher)) in enumerate(zip(students, self.pairs, strict=True)):
            target = gradients[dim][self.divergences.rows((layer, dim))]
            weights = self.grads[pair, :, None]
            if self.divergences.reverse:
                # p_s (log p_s - log p_t - KL)
                torch.sub(nodes[student], nodes[teacher], out=ratios)
                ratios.sub_(self.values[pair, :, None]).mul_(weights)
                if excluded is not None:
                    ratios[:, excluded] = 0
                target.add_(ratios.mul_(torch.exp(nodes[student], out=probabilities)))
            else:
                torch.exp(nodes[student], out=probabilities).sub_(torch.exp(nodes[teacher], out=ratios))
                target.add_(probabilities.mul_(weights))
