"""QAMA: train a quantizer, alone or with the encoder: truncated and quantised embeddings keep their similarities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ...encode.granularity import Granularity, Grid
from ...encode.precisions import FLOAT
from ...encode.states import Pooling, truncate
from ...modeling.quantization_m3bert import M3BertQuantizer, stored_bits
from ...utils import papers
from ...utils.numerics import cosine_matrix
from ..core.composition import mapping_of
from ..core.objective import NestedBatch, Terms, require_positive
from ..distillation.objective import RepresentationDistillation, TaughtTexts
from ..embedding.info_nce import nested_info_nce
from .losses import (
    added_dims_overlap,
    information_bottleneck,
    ramp,
    range_penalty,
    rank_error,
    similarity_divergence,
    similarity_error,
    soft_bits,
    threshold_repulsion,
    variance_control,
)


# Our choice, after the released code. As our level weights sum to 1 (there to 20.5 for dims 48 to 384), terms that are
# not similarities weigh about 20 times more than there. Bottleneck and variance are sums over dims: about 0.01 / 384.
WEIGHTS = {"sim": 1.0, "kl": 1.0, "rank": 1.0, "contrast": 0.01, "orthogonality": 1e-4, "quantization": 0.01}
WEIGHTS |= {"bottleneck": 3e-5, "variance": 3e-5}


class QAMA(RepresentationDistillation):
    """
    Matches the similarities of transformed embeddings to those of the teacher's embeddings, at every nested dim, as
    they are and quantised; regularises the added dims; keeps numbers away from thresholds (QAMA, Algorithm 1).

    No gradient passes through quantisation, as in the paper: similarities of codes are then terms of an evaluation
    only. With `quantized_gradient`, bits have the gradient of a soft step ([`soft_bits`]).

    Args:
        grid ([`Grid`]): Layers, and nested dims. The widest dim is the quantizer's hidden size.
        quantizer ([`M3BertQuantizer`]): The quantizer to train; see [`~M3BertQuantizer.initialize`].
        codes (`Sequence[str]`, *optional*, defaults to `("qama-2",)`): Codes whose similarities are matched.
        temperature (`float`, *optional*, defaults to 0.1): Temperature of the KL divergence.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Do not use equal texts as negatives of each other.
        weights (`dict[str, float]`, *optional*): Name of a term -> weight, in place of [`WEIGHTS`].
        pooling (`str`, *optional*, defaults to `"mean"`): Pooling of the encoder's hidden states.

    The other arguments are fields of [`QAMAConfig`].

    Raises:
        ValueError: if an argument is out of range; in forward, as [`RepresentationDistillation`].
    """

    name = "qama"
    title = "QAMA"
    equation = "QAMA, Algorithm 1: similarities of transformed and of quantised embeddings match the encoder's"
    papers = (papers.QAMA,)
    tags = ("qama", "matryoshka", "quantization", "sentence-similarity")

    def __init__(
        self,
        grid: Grid,
        *,
        quantizer: M3BertQuantizer,
        frozen: bool = True,
        codes: Sequence[str] = ("qama-2",),
        quantized_gradient: bool = False,
        matryoshka: bool = True,
        quantization_loss: bool = True,
        regularization: bool = True,
        variance_control: bool = True,
        temperature: float = 0.1,
        contrast_temperature: float = 0.05,
        mask_duplicates: bool = True,
        rank_texts: int = 8,
        weights: Mapping[str, float] | None = None,
        level_weights: Mapping[int, float] | None = None,
        pooling: Pooling = "mean",
    ):
        super().__init__(grid, teacher_dim=quantizer.config.hidden_size, pooling=pooling)
        if grid.dims != quantizer.config.dims:
            raise ValueError(f"The grid {grid} must have the nested dims of the quantizer, {quantizer.config.dims}.")
        if level_weights and set(level_weights) != set(grid.dims):
            raise ValueError(f"level_weights={dict(level_weights)} needs a weight for each of the dims {grid.dims}.")
        require_positive(temperature=temperature, contrast_temperature=contrast_temperature)
        for code in codes:
            stored_bits(code, quantizer.config.hidden_size)  # raises a ValueError if it is unknown
        self.quantizer, self.frozen = quantizer, frozen
        self.codes, self.quantized_gradient = tuple(codes), quantized_gradient
        self.matryoshka, self.quantization_loss = matryoshka, quantization_loss
        self.regularization, self.variance_control = regularization, variance_control
        self.temperature, self.contrast_temperature = temperature, contrast_temperature
        self.mask_duplicates, self.rank_texts = mask_duplicates, rank_texts
        self.weights = WEIGHTS | mapping_of("weights", weights, WEIGHTS)
        self.level_weights = dict(level_weights or {})
        self.progress = 0.0  # share of the training that is done, set by the trainer

    @property
    def layers(self) -> list[int]:
        """None if frozen: the quantizer then reads the teacher's embeddings."""
        return [] if self.frozen else self.grid.layers

    def dims(self, layer: int) -> list[int]:
        """Nested dims to match at a layer."""
        dims = self.grid.dims_of(layer)
        return dims if self.matryoshka else dims[-1:]

    def forward(self, batch: NestedBatch) -> Terms:
        taught = self.taught(batch)
        targets = cosine_matrix(taught.teacher, taught.all_teachers)
        terms: Terms = {}
        columns = len(batch.teacher or ())
        for layer in self.grid.layers:
            embeddings = (
                taught.teacher
                if self.frozen
                else torch.cat([text.pooled(layer, self.pooling) for text in batch.texts.values()])
            )
            transformed = self.quantizer(embeddings)
            everywhere = taught.rows.gather(transformed)
            for dim in self.dims(layer):
                g = Granularity(layer, dim)
                sides = {g: (truncate(transformed, dim), truncate(everywhere, dim))}
                if self.quantization_loss and (self.quantized_gradient or not self.training):
                    for code in self.codes:
                        bits = self.bits(everywhere, code, dim)
                        sides[Granularity(layer, dim, code)] = bits[taught.rows.offset :][: len(transformed)], bits
                for granularity, (vectors, candidates) in sides.items():
                    terms |= self.similarity_terms(granularity, vectors, candidates, targets, taught, columns)
            terms |= self.regularizers(layer, transformed, everywhere, taught)
            if self.training:
                self.quantizer.update_thresholds(everywhere.detach())
        return terms

    def bits(self, everywhere: torch.Tensor, code: str, dim: int) -> torch.Tensor:
        """Bits as 1 and -1, from the transformed texts of all ranks: the soft step depends on the whole batch."""
        margins = self.quantizer.margins(everywhere, code, dim)
        return soft_bits(margins if self.quantized_gradient else margins.detach())

    def similarity_terms(
        self,
        granularity: Granularity,
        vectors: torch.Tensor,
        candidates: torch.Tensor,
        targets: torch.Tensor,
        taught: TaughtTexts,
        columns: int,
    ) -> Terms:
        """The similarity losses at one granularity."""
        similarities, count = cosine_matrix(vectors, candidates), self.rank_texts
        divergences = similarity_divergence(similarities, targets, temperature=self.temperature)
        losses = {
            "sim": taught.rows.mean(similarity_error(similarities, targets)),
            "kl": taught.rows.mean(divergences),
            "rank": taught.rows.mean(rank_error(similarities[:count], targets[:count])),
        }
        if self.matryoshka and columns > 1:
            losses["contrast"] = self.contrast(vectors, candidates, taught, columns)
        weight = self.level_weight(granularity)
        return {
            self.term(granularity, name, weight=weight * self.weights[name]): loss for name, loss in losses.items()
        }

    def level_weight(self, granularity: Granularity) -> float:
        """Weight of the similarities at one granularity."""
        if granularity.code != FLOAT and not self.quantized_gradient:
            return 0.0  # reported in an evaluation, and not counted
        if self.level_weights:
            return self.level_weights[granularity.dim]
        return math.sqrt(granularity.dim) / sum(map(math.sqrt, self.dims(granularity.layer)))

    def contrast(
        self, vectors: torch.Tensor, candidates: torch.Tensor, taught: TaughtTexts, columns: int
    ) -> torch.Tensor:
        """InfoNCE of the first text column and the second, among all texts but the anchor itself and, on request,
        texts equal to the anchor or its positive."""
        pairs = len(vectors) // columns
        ids, all_ids = taught.targets[:, None], torch.arange(len(candidates), device=vectors.device)[:, None]
        if self.mask_duplicates and taught.own_ids is not None and taught.all_ids is not None:
            ids, all_ids = taught.own_ids, taught.all_ids
        losses = nested_info_nce(
            vectors[:pairs],
            candidates,
            dims=(vectors.shape[1],),
            temperature=self.contrast_temperature,
            targets=taught.targets[pairs : 2 * pairs],
            anchor_ids=torch.cat([ids[:pairs], ids[pairs : 2 * pairs]], dim=1),
            candidate_ids=all_ids.expand(-1, 2),
        )
        return taught.rows.mean(losses)[0]

    def regularizers(
        self, layer: int, transformed: torch.Tensor, everywhere: torch.Tensor, taught: TaughtTexts
    ) -> Terms:
        """The losses on the transformed embeddings alone."""
        widest = Granularity(layer, self.grid.dims_of(layer)[-1])
        losses: dict[str, torch.Tensor] = {}
        if self.regularization:
            losses["orthogonality"] = added_dims_overlap(everywhere, self.grid.dims_of(layer))
            losses["bottleneck"] = taught.rows.mean(information_bottleneck(transformed))
        if self.quantization_loss:
            losses["quantization"] = self.quantization(transformed, widest.dim, taught)
        if self.variance_control:
            # The new dims of each nested dim, on their vectors.
            dims = [0, *self.grid.dims_of(layer)]
            levels = zip(dims[:-1], dims[1:], strict=True)
            values = torch.stack([variance_control(everywhere[:, start:end]) for start, end in levels])
            losses["variance"] = ramp(self.progress) * values.sum()
        return {self.term(widest, name, weight=self.weights[name]): loss for name, loss in losses.items()}

    def quantization(self, transformed: torch.Tensor, dim: int, taught: TaughtTexts) -> torch.Tensor:
        """Distance from thresholds and range, averaged over the codes."""
        values = []
        for code in self.codes:
            for bits, place, numbers in self.quantizer.parts(transformed, code, dim):
                thresholds = self.quantizer.thresholds(bits)[:, place]
                # The outermost thresholds are quantiles: numbers may lie as far beyond them as they lie apart.
                reach = (thresholds[-1] - thresholds[0]).clamp(min=1 / dim)
                outside = range_penalty(numbers, thresholds[0] - 3 * reach, thresholds[-1] + 3 * reach)
                values.append(taught.rows.mean(threshold_repulsion(numbers, thresholds) + outside))
        return ramp(self.progress) * torch.stack(values).mean()
