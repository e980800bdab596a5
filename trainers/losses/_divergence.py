"""KL divergences between the distributions of a masked-LM head at two granularities, a block of the vocabulary at a
time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ._blocks import Buffers


Node = tuple[int, int]  # which layer of the stacked states, which dim


@dataclass(frozen=True)
class Divergences:
    """
    Which distributions are compared, and how.

    Args:
        pairs (`tuple[tuple[Node, Node], ...]`): Student and teacher of each pair.
        tokens (`int`): Rows of a layer; the rows of layer i are `i * tokens` to `(i + 1) * tokens`.
        reverse (`bool`): KL(student || teacher); otherwise KL(teacher || student).
        temperature (`float`): Scores are divided by it.
    """

    pairs: tuple[tuple[Node, Node], ...]
    tokens: int
    reverse: bool = True
    temperature: float = 1.0

    @property
    def nodes(self) -> list[Node]:
        """All that occur in a pair."""
        return sorted({node for pair in self.pairs for node in pair})

    def rows(self, node: Node) -> slice:
        """The rows of a node's layer."""
        return slice(node[0] * self.tokens, (node[0] + 1) * self.tokens)

    def of_dim(self, index: int) -> Iterator[tuple[int, slice]]:
        """Number and rows of the nodes that have this dim."""
        for number, node in enumerate(self.nodes):
            if node[1] == index:
                yield number, self.rows(node)

    def numbered(self) -> list[tuple[int, int]]:
        """The pairs as numbers of nodes."""
        nodes = self.nodes
        return [(nodes.index(student), nodes.index(teacher)) for student, teacher in self.pairs]


class RunningDivergences:
    """
    Their values, from blocks of scores that pass once. With p the distribution under which a divergence is a mean and
    q the other, KL(p || q) = E_p[s_p - s_q] - logsumexp(s_p) + logsumexp(s_q): a mean and two sums that are carried
    along, as the softmax is.
    """

    def __init__(self, divergences: Divergences, like: torch.Tensor, block_size: int) -> None:
        self.divergences, self.pairs = divergences, divergences.numbered()
        self.log_sums = like.new_full((len(divergences.nodes), divergences.tokens), -torch.inf)
        self.of_block = torch.empty_like(self.log_sums)
        self.means = like.new_zeros((len(self.pairs), divergences.tokens))
        self.kept = Buffers(like, len(divergences.nodes) + 2, divergences.tokens * block_size, like.dtype)

    def keep(self, index: int, scores: torch.Tensor, log_sums: torch.Tensor) -> None:
        """Take note of the scores `(rows, block)` of one dim, and of the log-sum-exp of each row `(rows,)`."""
        nodes, temperature = self.kept.of(self.divergences.tokens, scores.shape[1]), self.divergences.temperature
        for number, rows in self.divergences.of_dim(index):
            if temperature == 1:
                nodes[number].copy_(scores[rows])
                self.of_block[number] = log_sums[rows]
            else:
                torch.div(scores[rows], temperature, out=nodes[number])
                self.of_block[number] = torch.logsumexp(nodes[number], dim=1)

    def add_block(self, width: int, ruled_out: torch.Tensor | None) -> None:
        """The block is complete: carry its part on. `ruled_out` are entries whose bias is -inf."""
        *nodes, powers, differences = self.kept.of(self.divergences.tokens, width)
        before = self.log_sums.clone()
        # Finite even where a whole block is ruled out.
        of_block = self.of_block.clamp(min=torch.finfo(before.dtype).min)
        self.log_sums = torch.logaddexp(self.log_sums, of_block)
        shared = None
        for pair, (student, teacher) in enumerate(self.pairs):
            own, other = (student, teacher) if self.divergences.reverse else (teacher, student)
            if own != shared:
                torch.sub(nodes[own], of_block[own, :, None], out=powers).exp_()
                shared = own
            torch.sub(nodes[own], nodes[other], out=differences)
            if ruled_out is not None:
                differences[:, ruled_out] = 0
            mean = torch.linalg.vecdot(powers, differences)
            self.means[pair] *= (before[own] - self.log_sums[own]).exp()
            self.means[pair] += mean * (of_block[own] - self.log_sums[own]).exp()

    def values(self) -> torch.Tensor:
        """The divergences `(pairs, tokens)`."""
        sign = 1 if self.divergences.reverse else -1
        gaps = [self.log_sums[teacher] - self.log_sums[student] for student, teacher in self.pairs]
        return self.means + sign * torch.stack(gaps)


class DivergenceGradients:
    """Their gradients in the students' scores, a block at a time; a teacher has none."""

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
        self.kept = Buffers(values, len(divergences.nodes) + 2, divergences.tokens * block_size, values.dtype)

    def keep(self, index: int, scores: torch.Tensor) -> None:
        """Take note of the log-probabilities of one dim, from its scores `(rows, block)`."""
        nodes = self.kept.of(self.divergences.tokens, scores.shape[1])
        for number, rows in self.divergences.of_dim(index):
            scaled = scores[rows]
            if self.divergences.temperature != 1:
                scaled = torch.div(scaled, self.divergences.temperature, out=nodes[number])
            torch.sub(scaled, self.log_sums[number, :, None], out=nodes[number])

    def add_to(self, gradients: Sequence[torch.Tensor], ruled_out: torch.Tensor | None) -> None:
        """Add the gradients of the block's scores to those of each dim, `(rows, block)`."""
        *nodes, ratios, chances = self.kept.of(self.divergences.tokens, gradients[0].shape[1])
        students = [student for student, _ in self.divergences.pairs]
        for pair, ((layer, dim), (student, teacher)) in enumerate(zip(students, self.pairs, strict=True)):
            target = gradients[dim][self.divergences.rows((layer, dim))]
            weights = self.grads[pair, :, None]
            if self.divergences.reverse:
                # p_s (log p_s - log p_t - KL)
                torch.sub(nodes[student], nodes[teacher], out=ratios)
                ratios.sub_(self.values[pair, :, None]).mul_(weights)
                if ruled_out is not None:
                    ratios[:, ruled_out] = 0
                target.add_(ratios.mul_(torch.exp(nodes[student], out=chances)))
            else:
                torch.exp(nodes[student], out=chances).sub_(torch.exp(nodes[teacher], out=ratios))
                target.add_(chances.mul_(weights))
