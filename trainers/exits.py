"""
Exits in closed form: one ridge regression per layer, from its pooled state to the embedding of the last layer.

Every depth of the encoder then embeds into the same space, without any training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from statistics import mean
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from modeling_m3bert import M3BertModel
from modeling_m3bert.conversion_m3bert import refuse_unrepresentable

from .core.chunks import PassCost, in_row_order
from .core.compute import autocast
from .core.distributed import rank, sum_over_ranks, world_size
from .core.projection import Projection
from .core.ridge import AffineMap, RegressionSums, principal_axes
from .core.states import Pooling, check_pooling, max_positions, nested_states, truncate
from .data.embedding_store import fingerprint_of
from .data.teacher import TeacherEmbeddings
from .data.text_chunks import TOKENS_PER_TEXT, tokenized_chunks


BASES = ("last_layer", "principal")
PENALTIES = tuple(10 ** (exponent / 2) for exponent in range(-8, 1))  # 1e-4, 3.2e-4, ..., 1
VARIANCE_MATCHING = 0.5
TEXTS_AT_ONCE = 1024  # sorted by length, so that a batch has little padding
HELD_OUT = 10  # one row in ten chooses the penalty
LEAST_TEXTS_OF_A_SOURCE = 30  # the targets of fewer texts vary too little to judge a map by
ROWS_FOR_COSINES = 2000  # held-out rows kept for the report
Sources = Mapping[str, Iterable[str]]


@dataclass(frozen=True)
class LayerFit:
    """
    The fit of one exit.

    Args:
        penalty (`float`): The chosen penalty, as a multiple of the number of texts.
        r_squared (`float`): Share of the target's variance that the exit explains on held-out texts.
        cosine (`float`): Mean cosine of exit and target on held-out texts.
    """

    penalty: float
    r_squared: float
    cosine: float


@dataclass(frozen=True)
class ExitFit:
    """
    How the exits of a model were fitted. It is saved in the model's config as `exit_fit`.

    Args:
        layers (`dict[int, LayerFit]`): Layer -> its fit, for layers below the last.
        pooling (`str`): Pooling of the token states.
        basis (`str`): `"last_layer"` or `"principal"`.
        target (`str`): What the exits predict: `"last layer"`, or the name of a teacher.
        dim (`int`): Dims of the target's space, at most the model's width.
        variance_matching (`float`): How much of the regression's shrinkage was undone.
        texts (`int`): Number of texts, without empty ones.
        sources (`dict[str, int]`): Source -> its number of texts.
        fingerprint (`str`): Digest of the texts in their order.
        max_length (`int`): Maximum length of a text in tokens.
        prompts (`list[str]`): Prompts that were put before the texts in turn.
    """

    layers: Mapping[int, LayerFit]
    pooling: Pooling
    basis: str
    target: str
    dim: int
    variance_matching: float
    texts: int
    sources: Mapping[str, int]
    fingerprint: str
    max_length: int
    prompts: Sequence[str]

    def record(self) -> dict[str, Any]:
        """The fit as JSON values."""
        rounded = {
            str(layer): {name: float(f"{value:.4g}") for name, value in asdict(fit).items()}
            for layer, fit in self.layers.items()
        }
        return {**asdict(replace(self, layers={})), "prompts": list(self.prompts), "layers": rounded}


@torch.no_grad()
def fit_exits(
    model: M3BertModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str] | Sources,
    *,
    layers: Sequence[int] | None = None,
    pooling: Pooling = "mean",
    basis: str = "last_layer",
    projection: Projection | None = None,
    teacher: TeacherEmbeddings | None = None,
    teacher_name: str = "teacher",
    max_length: int | None = None,
    prompts: Sequence[str] = ("",),
    batch_size: int = 64,
    compute_dtype: torch.dtype | None = None,
    penalties: Sequence[float] = PENALTIES,
    variance_matching: float = VARIANCE_MATCHING,
    description: str | None = None,
    on_states: Callable[[list[str], dict[int, torch.Tensor]], None] | None = None,
) -> ExitFit:
    """
    Fit the exits of an m3BERT in closed form and install them. For each layer, a ridge regression maps the pooled
    state to the L2-normalised pooled embedding of the last layer. One pass over the texts serves all layers; memory
    does not grow with the number of texts, and all ranks share the work. Existing exits are replaced.

    The penalty of each layer is the one with the best mean R^2 on every tenth text; with several sources, also on each
    source of 30 texts or more when the others were fitted. The final fit uses all texts.

    Args:
        model ([`M3BertModel`]): The encoder, whole or with a head. It is changed in place.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        texts (`Iterable[str]` or `Mapping[str, Iterable[str]]`): Unlabelled texts, or several sources of texts by
            name. Empty texts are skipped. Queries should be among them if the model is to embed queries.
        layers (`Sequence[int]`, *optional*): Layers to give an exit, below the last; 0 is the embedding layer.
            Default: all of them.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"`, `"cls"` or `"lasttoken"`.
        basis (`str`, *optional*, defaults to `"last_layer"`): Basis of the common space. `"last_layer"` leaves the
            last layer as it is. `"principal"` rotates it to the principal components of its embeddings; full-width
            cosines do not change, and the rotation is stored as the exit of the last layer.
        projection ([`Projection`], *optional*): Projection that the model was published with. It becomes the exit of
            the last layer.
        teacher ([`TeacherEmbeddings`], *optional*): Embeddings of the texts by another encoder, to predict in place of
            the last layer's; the last layer gets an exit, too. Embeddings wider than the model are reduced to their
            principal components.
        teacher_name (`str`, *optional*, defaults to `"teacher"`): Name of the teacher, for the record.
        max_length (`int`, *optional*): Maximum length of a text in tokens. Default: the limit of the model.
        prompts (`Sequence[str]`, *optional*, defaults to `("",)`): Prompts that are put before the texts in turn, for
            encoders that were trained with prompts.
        batch_size (`int`, *optional*, defaults to 64): Number of texts of 128 tokens to encode at a time: more shorter
            texts, fewer longer ones. A CPU encodes at most 4,096 tokens at a time.
        compute_dtype (`torch.dtype`, *optional*): Type of the encoder's matrix products: `torch.bfloat16` or
            `torch.float16` (mixed precision). Default: the type of the weights. The fit itself is in float64.
        penalties (`Sequence[float]`, *optional*): Penalties to choose from, as multiples of the number of texts.
        variance_matching (`float`, *optional*, defaults to 0.5): How much of the regression's shrinkage to undo, from
            0 (none) to 1; see [`RegressionSums.match_variances`]. 0.5 was a compromise on development sets
            (benchmarks/reproduction/NOTES.md).
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.
        on_states (`Callable[[list[str], dict[int, torch.Tensor]], None]`, *optional*): Called with some texts and, by
            layer, their pooled states before any exit `(texts, width)`, until it has had all texts of this rank. An
            index of the texts then needs no second pass.

    Returns:
        [`ExitFit`]

    Raises:
        ValueError: if the model is not an m3BERT, a layer is outside it, there are fewer texts than dims, a state is
            not finite (the message names the layer), or an option is not legal.
    """
    encoder = model.base_model
    if encoder.config.model_type != "m3bert":
        refuse_unrepresentable(encoder.config)
        raise ValueError(f"{type(encoder).__name__} has no exits: convert it to an m3BERT first (m3bert convert).")
    depth, width = encoder.config.num_hidden_layers, encoder.config.hidden_size
    check_pooling(pooling)
    if not 0 <= variance_matching <= 1:
        raise ValueError(f"variance_matching={variance_matching} must be within 0..1.")
    if basis not in BASES:
        raise ValueError(f"basis={basis!r} is unknown; legal values: {', '.join(BASES)}.")
    if projection is not None and teacher is not None:
        raise ValueError("The exits predict a teacher or a projection of the last layer: pass one of them.")
    layers = list(range(depth)) if layers is None else sorted(set(layers))
    if not layers or layers[0] < 0 or layers[-1] >= depth:
        raise ValueError(f"layers={layers} must be within 0..{depth - 1}, the layers below the last.")
    limit = max_positions(encoder.config)
    max_length = max_length or min(limit, tokenizer.model_max_length)
    if not 0 < max_length <= limit:
        raise ValueError(f"max_length={max_length} must be within 1..{limit}, the model's limit.")

    reader = ExitReader(encoder, tokenizer, pooling, max_length, prompts, batch_size, compute_dtype)
    to_fit = [*layers, depth] if teacher is not None else layers
    sums = ExitSums(to_fit, width, projection, teacher)
    with (
        _raw_states(encoder),
        tqdm(desc=description, unit=" texts", disable=description is None or rank() > 0, leave=False) as bar,
    ):
        for source, its_texts in (texts if isinstance(texts, Mapping) else {"texts": texts}).items():
            sums.begin(source)
            for chunk, pooled in reader.read(source, its_texts, [*layers, depth]):
                sums.add(source, chunk, pooled, depth)
                if on_states is not None:
                    on_states(chunk, pooled)
                bar.update(len(chunk))
    count = sum(reader.counts.values())
    if count < width:
        raise ValueError(
            f"{count} texts are too few to fit exits of {width} dims: {width} texts are the minimum, and "
            f"{20 * width} or more are better."
        )
    sums.over_ranks()
    rotation = sums.rotation(basis)
    fits, exits = {}, {}
    for layer in to_fit:
        fits[layer], fitted = sums.fit(layer, penalties, variance_matching)
        exits[layer] = _padded(fitted.followed_by(rotation), width)
    if teacher is None and (basis != "last_layer" or projection is not None):
        last = torch.eye(width).double() if projection is None else projection.weight.double().cpu()
        exits[depth] = _padded(AffineMap(rotation @ last, last.new_zeros(len(rotation))), width)
    encoder.set_exits({layer: (affine.weight, affine.bias) for layer, affine in exits.items()})
    fit = ExitFit(
        layers=fits,
        pooling=pooling,
        basis=basis,
        target="last layer" if teacher is None else teacher_name,
        dim=len(rotation),
        variance_matching=variance_matching,
        texts=count,
        sources=reader.counts,
        fingerprint=reader.digest.hexdigest(),
        max_length=max_length,
        prompts=list(prompts),
    )
    encoder.config.exit_fit = fit.record()
    encoder.config.matryoshka_layers = [*layers, depth]
    if len(rotation) < width:
        encoder.config.output_dim = len(rotation)
        encoder.config.matryoshka_dims = [dim for dim in encoder.config.matryoshka_dims if dim <= len(rotation)]
    return fit


@contextmanager
def _raw_states(encoder: M3BertModel) -> Iterator[None]:
    """Evaluation mode without exits; both are restored afterwards."""
    exits, training = encoder.exits, encoder.training
    encoder.exits = torch.nn.ModuleDict()
    encoder.eval()
    try:
        yield
    finally:
        encoder.exits = exits
        encoder.train(training)


class ExitReader:
    """Reads texts in chunks and encodes this rank's share of them."""

    def __init__(
        self,
        encoder: M3BertModel,
        tokenizer: PreTrainedTokenizerBase,
        pooling: Pooling,
        max_length: int,
        prompts: Sequence[str],
        batch_size: int,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.encoder, self.tokenizer, self.pooling = encoder, tokenizer, pooling
        self.max_length, self.prompts, self.batch_size = max_length, prompts, batch_size
        self.compute_dtype = compute_dtype
        self.counts: dict[str, int] = {}
        self.digest = blake2b(digest_size=16)

    def read(
        self, source: str, texts: Iterable[str], layers: Sequence[int]
    ) -> Iterator[tuple[list[str], dict[int, torch.Tensor]]]:
        """Yield chunks of texts, and layer -> their pooled states `(texts, width)`."""
        self.counts[source] = 0
        remaining = (text for text in texts if text.strip())
        while chunk := list(islice(remaining, TEXTS_AT_ONCE * world_size())):
            start, own = self.counts[source], range(rank(), len(chunk), world_size())
            self.counts[source] += len(chunk)
            fingerprint_of(chunk, self.digest)
            prompted = [self.prompts[(start + row) % len(self.prompts)] + chunk[row] for row in own]
            if prompted:
                yield [chunk[row] for row in own], self.encode(prompted, layers)

    def encode(self, texts: list[str], layers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Layer -> pooled states of texts `(texts, width)`."""
        device = self.encoder.device
        cost = PassCost.on(device).limited(self.batch_size * TOKENS_PER_TEXT)
        chunks: list[list[int]] = []
        vectors: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        for chunk, inputs in tokenized_chunks(self.tokenizer, texts, self.max_length, cost):
            with autocast(device, self.compute_dtype):
                states = nested_states(self.encoder, inputs.to(device), layers)
            chunks.append(chunk)
            for layer in layers:
                vectors[layer].append(states.pooled(layer, self.pooling))
        return {layer: in_row_order(parts, chunks) for layer, parts in vectors.items()}


class ExitSums:
    """
    What a fit keeps of the texts: regression sums per source, fold and layer, and some held-out rows for the report.

    Args:
        layers (`Sequence[int]`): Layers to fit.
        width (`int`): Width of the model.
        projection ([`Projection`], *optional*): Projection of the last layer, which is predicted after it.
        teacher ([`TeacherEmbeddings`], *optional*): Embeddings to predict in place of the last layer's.
    """

    def __init__(
        self,
        layers: Sequence[int],
        width: int,
        projection: Projection | None = None,
        teacher: TeacherEmbeddings | None = None,
    ) -> None:
        self.layers, self.projection, self.teacher = layers, projection, teacher
        self.width, self.dim = width, width
        if projection is not None:
            self.dim = projection.out_features
        if teacher is not None:
            self.dim = teacher.width
        self.parts: dict[tuple[str, bool], dict[int, RegressionSums]] = {}  # (source, held out) -> layer -> sums
        self.targets = RegressionSums.zero(self.dim, self.dim)
        self.rows: list[tuple[dict[int, torch.Tensor], torch.Tensor]] = []  # held-out states and targets
        self.held_rows = 0

    def begin(self, source: str) -> None:
        """Start a source of texts. Every rank starts all sources, also those of which it gets no texts."""
        for held_out in (False, True):
            self.parts[source, held_out] = {layer: RegressionSums.zero(self.width, self.dim) for layer in self.layers}

    def add(self, source: str, texts: Sequence[str], pooled: Mapping[int, torch.Tensor], depth: int) -> None:
        """
        Add texts of a source.

        Args:
            source (`str`): Name of the source.
            texts (`Sequence[str]`): The texts.
            pooled (`Mapping[int, torch.Tensor]`): Layer -> raw pooled states `(texts, width)`, also of the last layer.
            depth (`int`): The last layer.

        Raises:
            ValueError: if a state is not finite. The message names the layer.
        """
        for layer, vectors in pooled.items():
            wrong = (~torch.isfinite(vectors)).any(dim=1).nonzero()
            if len(wrong):
                text = texts[int(wrong[0])]
                raise ValueError(f"The states of layer {layer} are not finite, for example of {text[:80]!r}.")
        targets = pooled[depth].double()
        if self.projection is not None:
            targets = targets @ self.projection.weight.T.to(targets)
        if self.teacher is not None:
            targets = self.teacher.of(texts).to(targets)
        targets = truncate(targets, targets.shape[1], normalize=True)
        self.targets += RegressionSums.of(targets, targets)
        # By a digest of the text, so that equal texts are on the same side.
        digests = [blake2b(text.encode(), digest_size=4).digest() for text in texts]
        held = torch.tensor([int.from_bytes(digest, "big") % HELD_OUT == 0 for digest in digests])
        held = held.to(targets.device)
        for held_out, rows in ((False, ~held), (True, held)):
            sums = self.parts[source, held_out]
            for layer in self.layers:
                sums[layer] += RegressionSums.of(pooled[layer][rows], targets[rows])
        if self.held_rows < ROWS_FOR_COSINES:
            self.rows.append(({layer: pooled[layer][held] for layer in self.layers}, targets[held]))
            self.held_rows += int(held.sum())

    def over_ranks(self) -> None:
        """Add the sums of all ranks."""
        self.targets = self.targets.over_ranks()
        for sums in self.parts.values():
            for layer in self.layers:
                sums[layer] = sums[layer].over_ranks()

    def of(self, layer: int, held_out: bool | None = None, without: str | None = None) -> RegressionSums:
        """The sums of a layer over one fold (`None` is both) and all sources but one."""
        total = RegressionSums.zero(self.width, self.dim)
        for (source, fold), sums in self.parts.items():
            if source != without and held_out in (None, fold):
                total += sums[layer]
        return total

    def fit(
        self,
        layer: int,
        penalties: Sequence[float] = PENALTIES,
        variance_matching: float = VARIANCE_MATCHING,
    ) -> tuple[LayerFit, AffineMap]:
        """The fit of a layer: its report from held-out texts, and the map fitted to all texts."""
        held_out, fitted = self.of(layer, held_out=True), self.of(layer, held_out=False)
        maps = fitted.solve(penalties)
        best = self.best_penalty(layer, penalties, [held_out.r_squared(affine) for affine in maps])
        kept = self.matched(fitted, maps[best], variance_matching)
        report = LayerFit(penalties[best], held_out.r_squared(kept), self.cosine(layer, kept))
        every = self.of(layer)
        (affine,) = every.solve([penalties[best]])
        return report, self.matched(every, affine, variance_matching)

    def best_penalty(self, layer: int, penalties: Sequence[float], on_rows: Sequence[float]) -> int:
        """Index of the penalty with the best mean R^2 on held-out rows (`on_rows`, one value per penalty) and, with
        several sources, on held-out sources, except those with very few texts."""
        scores = [on_rows]
        sources = list(dict.fromkeys(source for source, _ in self.parts))
        if len(sources) > 1:
            by_source = []
            for source in sources:
                others = self.of(layer, without=source)
                its = self.of(layer) - others
                if its.count >= LEAST_TEXTS_OF_A_SOURCE:
                    by_source.append([its.r_squared(affine) for affine in others.solve(penalties)])
            if by_source:
                scores.append([mean(values) for values in zip(*by_source, strict=True)])
        means = [mean(values) for values in zip(*scores, strict=True)]
        return means.index(max(means))

    def matched(self, sums: RegressionSums, affine: AffineMap, strength: float) -> AffineMap:
        """A regression of some sums with the variances of its predictions matched along the targets' axes."""
        return sums.match_variances(affine, self.target_axes, self.target_variances, strength)

    @cached_property
    def target_axes(self) -> torch.Tensor:
        """Principal axes of the targets, as rows. Read it after the last text was added."""
        return principal_axes(self.targets.input_covariance())

    @cached_property
    def target_variances(self) -> torch.Tensor:
        """Variance of the targets along each of their principal axes."""
        return ((self.target_axes @ self.targets.input_covariance()) * self.target_axes).sum(dim=1)

    def cosine(self, layer: int, affine: AffineMap) -> float:
        """Mean cosine of a map's output and its target on the held-out rows that were kept."""
        total = torch.zeros(2, dtype=torch.float64)
        for states, targets in self.rows:
            cosines = torch.nn.functional.cosine_similarity(affine(states[layer].double()), targets)
            total += torch.stack([cosines.sum().cpu(), torch.tensor(float(len(cosines)), dtype=torch.float64)])
        total = sum_over_ranks(total)
        return float(total[0] / total[1])

    def rotation(self, basis: str) -> torch.Tensor:
        """
        The map from the target's space to that of the exits, `(dims of the exits, target dims)`: the identity, or the
        principal axes of the targets, of which a model keeps as many as its width.
        """
        if basis == "last_layer" and self.dim <= self.width:
            return torch.eye(self.dim, dtype=torch.float64)
        return self.target_axes[: self.width]


def _padded(affine: AffineMap, width: int) -> AffineMap:
    """The map with zero outputs behind its own, up to `width`."""
    missing = width - len(affine.bias)
    return AffineMap(
        torch.nn.functional.pad(affine.weight, (0, 0, 0, missing)), torch.nn.functional.pad(affine.bias, (0, missing))
    )
