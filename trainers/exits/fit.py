"""
Exits in closed form: one ridge regression per layer, from its pooled hidden state to the embedding of the last layer,
and a table with one row per token of the vocabulary that they read beside it.

Every depth of the encoder then embeds into the same space, without any training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from modeling_m3bert import EmbeddingSettings, M3BertModel
from modeling_m3bert.conversion_m3bert import refuse_unrepresentable

from ..core.device import autocast
from ..core.encoding.chunking import PassCost, in_row_order
from ..core.parallel.ranks import rank
from ..core.projection import Projection
from ..core.states import Pooling, check_pooling, longest_text, max_positions, nested_states, truncate
from ..data.padded_batches import TOKENS_PER_TEXT, padded_chunks
from ..data.teacher import TeacherEmbeddings
from ..data.token_features import TokenFeatures, check_tokenizer, token_embeddings
from ..data.tokenized_texts import TokenizedText, TokenizedTexts
from .ridge import Name
from .stitches import MOST_TEXTS, Stitches, StitchFit, fit_stitches, top_layers_of
from .sums import FEATURES, TARGET, ExitSums, Fit, LayerFit


logger = logging.getLogger(__name__)
BASES = ("last_layer", "principal")
STITCHED_TEXTS = 5000  # for the exits of stitched depths, which are encoded once more
Sources = Mapping[str, Iterable[str]]
States = dict[int, torch.Tensor]  # layer -> pooled states (texts, width)


@dataclass(frozen=True)
class ExitFit:
    """
    How the exits of a model were fitted. It is saved in the model's config as `exit_fit`.

    Args:
        layers (`dict[int, LayerFit]`): Layer -> its fit, for layers below the last.
        state_only (`dict[int, LayerFit]`): Layer -> the fit of the map that reads the hidden state without the static
            table, for layers that have both.
        pooling (`str`): Pooling of the hidden states of tokens.
        basis (`str`): `"last_layer"` or `"principal"`.
        target (`str`): What the exits predict: `"last layer"`, or the name of a teacher.
        dim (`int`): Dims of the target's space, at most the model's hidden size.
        texts (`int`): Number of texts, without empty ones.
        sources (`dict[str, int]`): Source -> its number of texts.
        fingerprint (`str`): Digest of the texts in their order.
        max_length (`int`): Maximum length of a text in tokens.
        prompts (`list[str]`): Prompts that were put before the texts in turn.
        features (`int`): Number of features of a token that the static table was fitted from; 0 without a table. With
            fewer texts than features, a fit relies on its penalty.
        stitches (`dict[int, StitchFit]`): Stitched depth -> the fit of its stitch. `layers` has that of its exit.
    """

    layers: Mapping[int, LayerFit]
    state_only: Mapping[int, LayerFit]
    pooling: Pooling
    basis: str
    target: str
    dim: int
    texts: int
    sources: Mapping[str, int]
    fingerprint: str
    max_length: int
    prompts: Sequence[str]
    features: int
    stitches: Mapping[int, StitchFit]

    def record(self) -> dict[str, Any]:
        """The fit as JSON values."""

        def rounded(fits: Mapping[int, LayerFit | StitchFit]) -> dict[str, dict[str, float]]:
            return {
                str(layer): {
                    name: value if isinstance(value, int) else float(f"{value:.4g}")
                    for name, value in asdict(fit).items()
                }
                for layer, fit in fits.items()
            }

        values = asdict(replace(self, layers={}, state_only={}, stitches={})) | {"prompts": list(self.prompts)}
        if self.stitches:
            values["stitches"] = rounded(self.stitches)
        else:
            del values["stitches"]
        return values | {"layers": rounded(self.layers), "state_only": rounded(self.state_only)}


@torch.no_grad()
def fit_exits(
    model: M3BertModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str] | Sources,
    *,
    layers: Sequence[int] | None = None,
    pooling: Pooling | None = None,
    static: bool = True,
    stitches: Stitches = (),
    basis: str = "last_layer",
    projection: Projection | None = None,
    teacher: TeacherEmbeddings | None = None,
    teacher_name: str = "teacher",
    max_length: int | None = None,
    prompts: Sequence[str] | None = None,
    batch_size: int = 64,
    compute_dtype: torch.dtype | None = None,
    cache_dir: str | Path | None = None,
    description: str | None = None,
    on_states: Callable[[list[str], States], None] | None = None,
) -> ExitFit:
    """
    Fit the exits of an m3BERT in closed form and install them. Existing exits are replaced. Memory does not grow with
    the number of texts, and all ranks share the work.

    1. The texts are tokenised once, and the share p_t of each token t is counted.
    2. Each token of the vocabulary is encoded as a text of its own: s_t. With its input embedding e_t, both also
       weighted by a / (a + p_t), it has the features phi_t.
    3. The texts are encoded once.
    4. Layer 0: a ridge regression from the mean of phi over a text's tokens to its L2-normalised embedding at the
       last layer. It gives the static table T, one row per token: layer 0 of a text is the mean of its tokens' rows.
    5. Layer l: a ridge regression from [pooled hidden state of l, mean of T] to the same target; beside it, one from
       the hidden state alone, which a native export uses.
    6. Stitched depth l with k last layers: a ridge regression over the tokens of 2,500 texts, from [hidden state of
       layer l - k, row of T] to the hidden state that the last k layers read. Its penalty is the one that explains
       most of the tokens of held-out texts. 5,000 texts are then encoded at the stitched depths, for their exits as
       in 5.

    The penalty of each regression is the one that keeps most of the nearest ten texts, on at most 2,000 held-out
    texts; the final fit uses all texts. Predictions are scaled to the variances of the target
    ([`Regression.match_variances`]).

    Args:
        model ([`M3BertModel`]): The encoder, whole or with a head. It is changed in place.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        texts (`Iterable[str]` or `Mapping[str, Iterable[str]]`): Unlabelled texts, or several sources of texts by
            name. Empty texts are skipped. Queries should be among them if the model is to embed queries.
        layers (`Sequence[int]`, *optional*): Layers to give an exit, below the last; 0 is the embedding layer.
            Default: all of them. With a static table, layer 0 is always among them.
        pooling (`str`, *optional*): `"mean"`, `"cls"` or `"lasttoken"`. Default: as the model was published, else the
            mean.
        static (`bool`, *optional*, defaults to `True`): Whether the exits read a static table, too. It needs a fast
            tokenizer, and a pass over its vocabulary.
        stitches (`Sequence[int]` or `Mapping[int, int]`, *optional*): Depths below the last to stitch, or depth -> its
            number of last layers, by default half of them, and at least 1. The exit of a stitched depth is that of its
            stitched hidden state.
        basis (`str`, *optional*, defaults to `"last_layer"`): Basis of the common space. `"last_layer"` leaves the
            last layer as it is. `"principal"` rotates it to the principal components of its embeddings; full-size
            cosines do not change, and the rotation is stored as the exit of the last layer.
        projection ([`Projection`], *optional*): Projection of the last layer. It becomes the exit of the last layer.
            Default: the one that the model was published with, if there is one and no teacher.
        teacher ([`TeacherEmbeddings`], *optional*): Embeddings of the texts by another encoder, to predict in place of
            the last layer's; the last layer gets an exit, too. Embeddings wider than the model are reduced to their
            principal components.
        teacher_name (`str`, *optional*, defaults to `"teacher"`): Name of the teacher, for the record.
        max_length (`int`, *optional*): Maximum length of a text in tokens. Default: as the model was published, else
            its limit.
        prompts (`Sequence[str]`, *optional*): Prompts that are put before the texts in turn, for encoders that were
            trained with prompts. Default: those that the model was published with, else none.
        batch_size (`int`, *optional*, defaults to 64): Number of texts of 128 tokens to encode at a time: more shorter
            texts, fewer longer ones. A CPU encodes at most 4,096 tokens at a time.
        compute_dtype (`torch.dtype`, *optional*): Type of the encoder's matrix products: `torch.bfloat16` or
            `torch.float16` (mixed precision). Default: the type of the weights. The fit itself is in float64.
        cache_dir (`str` or `Path`, *optional*): Folder that keeps the embeddings of the vocabulary's tokens, for the
            next fit. Default: they are kept until the pass over the vocabulary is complete.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.
        on_states (`Callable[[list[str], dict[int, torch.Tensor]], None]`, *optional*): Called with some texts and, by
            layer, their pooled hidden states before any exit `(texts, width)`, until it has had all texts of this
            rank. An index of the texts then needs no second pass. Stitched depths are not among the layers.

    Returns:
        [`ExitFit`]

    Raises:
        ValueError: if the model is not an m3BERT, a layer is outside it, the tokenizer is not the model's or cannot
            give a static table, there are fewer texts than dims, a hidden state is not finite (the message names the
            layer and a text, or the token), or an option is not legal.
    """
    encoder = model.base_model
    published = EmbeddingSettings.of(encoder)
    settings = published or EmbeddingSettings()
    pooling = pooling or settings.pooling
    if prompts is None:
        prompts = list(dict.fromkeys(settings.prompts.values())) or [""]
    if projection is None and teacher is None:
        projection = Projection.of(settings.projection)
    layers, max_length = _checked(encoder, tokenizer, layers, pooling, static, basis, max_length, settings.max_length)
    if projection is not None and teacher is not None:
        raise ValueError("The exits predict a teacher or a projection of the last layer: pass one of them.")
    depth, width = encoder.config.num_hidden_layers, encoder.config.hidden_size
    tops = top_layers_of(stitches, depth)
    layers = [layer for layer in layers if layer not in tops]

    sources = texts if isinstance(texts, Mapping) else {"texts": texts}
    tokenized = TokenizedTexts(sources, tokenizer, max_length, prompts)
    if len(tokenized) < width:
        raise ValueError(
            f"{len(tokenized)} texts are too few to fit exits of {width} dims: {width} texts are the minimum, and "
            f"{20 * width} or more are better."
        )
    encode = partial(pooled_states, encoder, tokenizer, pooling, batch_size, compute_dtype)
    tokens = None
    with _raw_states(encoder):
        if static:
            identity = {"pooling": pooling, "compute_dtype": str(compute_dtype or encoder.dtype)}
            progress = description is not None
            embeddings = token_embeddings(encoder, tokenizer, encode, identity, cache_dir, progress=progress)
            tokens = _token_features(encoder, tokenizer, tokenized, embeddings)
        mapped = [layer for layer in layers if layer > 0 or tokens is None] + ([] if teacher is None else [depth])
        widths: dict[Name, int] = {**dict.fromkeys(mapped, width), TARGET: _target_width(width, projection, teacher)}
        if tokens is not None:
            widths[FEATURES] = tokens.width
        sums, targets = ExitSums(widths, len(tokenized)), []
        for group, pooled in _encoded(tokenized, len(tokenized), encode, [*layers, depth], description):
            rows: dict[Name, torch.Tensor] = {layer: pooled[layer] for layer in mapped}
            rows[TARGET] = _targets(group, pooled[depth], projection, teacher)
            if tokens is not None:
                rows[FEATURES] = tokens.means([its.ids for its in group]).to(pooled[depth].device)
            sums.add([its.text for its in group], rows)
            if tops:
                targets.append(_sampled(rows[TARGET], tokenized, STITCHED_TEXTS))
            if on_states is not None:
                on_states([its.text for its in group], pooled)
    sums.over_ranks()

    rotation = _rotation(sums.target_axes, basis, width)
    to_space = torch.nn.functional.pad(rotation.T, (0, width - len(rotation)))  # of the exits: the model's width
    fits = {layer: sums.fit([layer]) for layer in mapped}
    table, joints, static_maps = None, {}, None
    if tokens is not None:
        table = sums.fit([FEATURES])
        static_maps = _static_maps(sums, table, to_space)
        joints = _joint_maps(sums, static_maps, [layer for layer in mapped if layer < depth], to_space)
    static_table = None if table is None or tokens is None else tokens.table(table.affine @ to_space)
    ignored = sorted(set(tokenizer.all_special_ids)) if static else ()
    stitched: dict[int, tuple[StitchFit, torch.Tensor]] = {}
    if tops:
        with _restored_on_error(encoder):
            stitched = _install_stitches(
                encoder, tokenizer, tokenized, tops, static_table, ignored, batch_size, compute_dtype
            )
            label = description and f"{description} of stitched depths"
            own = _stitched_sums(encoder, tokenized, tokens, [*tops], targets, encode, label)
        fits |= {layer: own.fit([layer]) for layer in tops}
        if static_maps is not None:
            joints |= _joint_maps(own, static_maps, [*tops], to_space)

    exits = {layer: fit.affine @ to_space for layer, fit in fits.items()}
    if teacher is None and (basis != "last_layer" or projection is not None):
        last = torch.eye(width).to(to_space) if projection is None else projection.weight.to(to_space)
        exits[depth] = torch.nn.functional.pad(last.T, (0, 0, 1, 0)) @ to_space
    encoder.set_exits(
        {layer: _weight_and_bias(affine) for layer, affine in exits.items()},
        joints={layer: _weight_and_bias(joint.affine) for layer, joint in joints.items()},
        static_table=static_table,
        static_ignored_ids=ignored,
        stitches={layer: (its.top_layers, *_weight_and_bias(affine)) for layer, (its, affine) in stitched.items()},
    )
    read = dict(sorted((fits | joints if table is None else {0: table} | fits | joints).items()))
    fit = ExitFit(
        layers={layer: its.report for layer, its in read.items()},
        state_only={layer: fits[layer].report for layer in joints if layer not in tops},  # no stitched native export
        pooling=pooling,
        basis=basis,
        target="last layer" if teacher is None else teacher_name,
        dim=len(rotation),
        texts=len(tokenized),
        sources=tokenized.counts,
        fingerprint=tokenized.fingerprint,
        max_length=max_length,
        prompts=list(prompts),
        features=0 if tokens is None else tokens.width,
        stitches={layer: its for layer, (its, _) in stitched.items()},
    )
    _declare(encoder, fit, sorted([*layers, *tops, depth]))
    if published is not None:  # the exits hold the projection now
        longest = longest_text(encoder.config, tokenizer, published.max_length)
        encoder.embedding_settings = replace(published, pooling=pooling, projection=None, max_length=longest)
    return fit


def _declare(encoder: M3BertModel, fit: ExitFit, layers: list[int]) -> None:
    """Put the fit, its layers and its dims into the config."""
    config = encoder.config
    config.exit_fit, config.matryoshka_layers = fit.record(), layers
    if fit.dim < config.hidden_size:
        config.output_dim = fit.dim
        config.matryoshka_dims = [dim for dim in config.matryoshka_dims if dim <= fit.dim]


def _checked(
    encoder: M3BertModel,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int] | None,
    pooling: str,
    static: bool,
    basis: str,
    max_length: int | None,
    published_length: int | None,
) -> tuple[list[int], int]:
    """The layers to fit and the maximum length, after all checks that need no text."""
    if encoder.config.model_type != "m3bert":
        refuse_unrepresentable(encoder.config)
        raise ValueError(f"{type(encoder).__name__} has no exits: convert it to an m3BERT first (m3bert convert).")
    check_pooling(pooling)
    if basis not in BASES:
        raise ValueError(f"basis={basis!r} is unknown; legal values: {', '.join(BASES)}.")
    depth, limit = encoder.config.num_hidden_layers, max_positions(encoder.config)
    layers = list(range(depth)) if layers is None else sorted(set(layers))
    if not layers or layers[0] < 0 or layers[-1] >= depth:
        raise ValueError(f"layers={layers} must be within 0..{depth - 1}, the layers below the last.")
    max_length = max_length or longest_text(encoder.config, tokenizer, published_length)
    if not 0 < max_length <= limit:
        raise ValueError(f"max_length={max_length} must be within 1..{limit}, the model's limit.")
    if static:
        check_tokenizer(tokenizer, encoder.config.vocab_size)
        layers = sorted({0, *layers})  # the table itself
    return layers, max_length


@contextmanager
def _raw_states(encoder: M3BertModel, stitched: bool = False) -> Iterator[None]:
    """Evaluation mode without exits, and with stitches on request only; all is restored afterwards."""
    config, exits, training = encoder.config, encoder.exits, encoder.training
    hidden = () if stitched else ("static_layers", "stitch_layers", "stitch_top_layers")
    kept = {name: getattr(config, name) for name in hidden}
    encoder.exits = torch.nn.ModuleDict()
    for name in hidden:
        setattr(config, name, [])
    encoder.eval()
    try:
        yield
    finally:
        encoder.exits = exits
        for name, value in kept.items():
            setattr(config, name, value)
        encoder.train(training)


def pooled_states(
    encoder: M3BertModel,
    tokenizer: PreTrainedTokenizerBase,
    pooling: Pooling,
    batch_size: int,
    compute_dtype: torch.dtype | None,
    ids: list[list[int]],
    layers: Sequence[int],
) -> States:
    """Layer -> pooled hidden states of texts `(texts, width)`, which are given by their token ids."""
    cost = PassCost.on(encoder.device).limited(batch_size * TOKENS_PER_TEXT)
    chunks: list[list[int]] = []
    vectors: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    for chunk, inputs in padded_chunks(tokenizer, ids, cost):
        with autocast(encoder.device, compute_dtype):
            states = nested_states(encoder, inputs.to(encoder.device), layers)
        chunks.append(chunk)
        for layer in layers:
            vectors[layer].append(states.pooled(layer, pooling))
    return {layer: in_row_order(parts, chunks) for layer, parts in vectors.items()}


@contextmanager
def _restored_on_error(encoder: M3BertModel) -> Iterator[None]:
    """Give an encoder back the exits, stitches and static table that it had if the block fails or is interrupted."""
    config, modules = encoder.config, (encoder.exits, encoder.stitches, encoder.static_table)
    names = ("exit_layers", "static_layers", "static_ignored_ids", "stitch_layers", "stitch_top_layers")
    kept = {name: getattr(config, name) for name in (*names, "matryoshka_layers")}
    try:
        yield
    except BaseException:
        encoder.exits, encoder.stitches, encoder.static_table = modules
        for name, value in kept.items():
            setattr(config, name, value)
        raise


def _token_features(
    encoder: M3BertModel, tokenizer: PreTrainedTokenizerBase, tokenized: TokenizedTexts, embeddings: torch.Tensor
) -> TokenFeatures:
    """The features of all tokens: embeddings at the last layer and in the embedding table, by frequency."""
    ignored = sorted(set(tokenizer.all_special_ids))
    shares = tokenized.shares(encoder.config.vocab_size, ignored)
    features = TokenFeatures([embeddings, encoder.embed_tokens.weight.detach().float().cpu()], shares, ignored)
    if len(tokenized) < features.width:
        logger.warning(
            f"{len(tokenized):,} texts are fewer than the {features.width:,} features of a token that the static "
            "table is fitted from: it relies on its penalty, and more texts make it better."
        )
    return features


def _encoded(
    groups: Iterable[list[TokenizedText]],
    total: int,
    encode: Callable[..., States],
    layers: Sequence[int],
    description: str | None,
) -> Iterator[tuple[list[TokenizedText], States]]:
    """Groups of texts with their pooled hidden states. Raises a ValueError if a hidden state is not finite."""
    quiet = description is None or rank() > 0
    with tqdm(total=total, desc=description, unit=" texts", disable=quiet, leave=False) as bar:
        for group in groups:
            pooled = encode([its.ids for its in group], layers)
            for layer, vectors in pooled.items():
                wrong = (~torch.isfinite(vectors)).any(dim=1).nonzero()
                if len(wrong):
                    text = group[int(wrong[0])].text
                    raise ValueError(f"Hidden states of layer {layer} are not finite, for example of {text[:80]!r}.")
            yield group, pooled
            bar.update(len(group))


def _target_width(width: int, projection: Projection | None, teacher: TeacherEmbeddings | None) -> int:
    if teacher is not None:
        return teacher.width
    return width if projection is None else projection.out_features


def _targets(
    group: Sequence[TokenizedText],
    last: torch.Tensor,
    projection: Projection | None,
    teacher: TeacherEmbeddings | None,
) -> torch.Tensor:
    """What the exits predict, `(texts, target width)`, from the pooled hidden states of the last layer."""
    vectors = last.double()
    if projection is not None:
        vectors = vectors @ projection.weight.T.to(vectors)
    if teacher is not None:
        vectors = teacher.of([its.text for its in group]).to(vectors)
    return truncate(vectors, vectors.shape[1], normalize=True)


def _rotation(axes: torch.Tensor, basis: str, width: int) -> torch.Tensor:
    """
    The map from the target's space to that of the exits, `(dims of the exits, target dims)`: the identity, or the
    principal axes of the targets, of which a model keeps as many as its hidden size.
    """
    if basis == "last_layer" and len(axes) <= width:
        return torch.eye(len(axes)).to(axes)
    return axes[:width]


def _static_maps(sums: ExitSums, table: Fit, to_space: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The maps from features to the static vector in the target's space, one per fold and one of all texts, and the
    map from the static vector of the model to it."""
    # Of a target wider than the model, only what the model keeps.
    kept = _rotation(sums.target_axes, "last_layer", to_space.shape[1]).T
    return [affine @ kept for affine in sums.tables(table.report)], to_space.T @ kept


def _joint_maps(
    sums: ExitSums, static_maps: tuple[list[torch.Tensor], torch.Tensor], layers: Sequence[int], to_space: torch.Tensor
) -> dict[int, Fit]:
    """
    Layer -> the map from its hidden state and the static vector to the space of the exits. It is fitted in the
    target's space, so that the basis of the exits does not change it.
    """
    width, (of_folds, from_space) = to_space.shape[1], static_maps
    joints = {layer: sums.fit_with_table(layer, of_folds) for layer in layers}
    return {
        layer: Fit(report, torch.cat([affine[: 1 + width], from_space @ affine[1 + width :]]) @ to_space)
        for layer, (report, affine) in joints.items()
    }


def _sampled(rows: Any, tokenized: TokenizedTexts, most: int) -> Any:
    """At most this number of texts, or of their rows, spread over all sources."""
    return rows[:: max(1, -(-len(tokenized) // most))]


def _install_stitches(
    encoder: M3BertModel,
    tokenizer: PreTrainedTokenizerBase,
    tokenized: TokenizedTexts,
    tops: Mapping[int, int],
    static_table: torch.Tensor | None,
    ignored: Sequence[int],
    batch_size: int,
    compute_dtype: torch.dtype | None,
) -> dict[int, tuple[StitchFit, torch.Tensor]]:
    """Fit the stitches, and install them with identities as exits."""
    groups = (_sampled(group, tokenized, MOST_TEXTS) for group in tokenized)
    cost = PassCost.on(encoder.device).limited(batch_size * TOKENS_PER_TEXT)
    with _raw_states(encoder):
        found = fit_stitches(encoder, tokenizer, groups, tops, static_table, cost=cost, compute_dtype=compute_dtype)
    width = encoder.config.hidden_size
    identities = {layer: (torch.eye(width), torch.zeros(width)) for layer in tops}
    joints = {layer: (torch.eye(width, 2 * width), torch.zeros(width)) for layer in tops}
    encoder.set_exits(
        identities,
        joints=None if static_table is None else joints,
        static_table=static_table,
        static_ignored_ids=ignored,
        stitches={layer: (its.top_layers, *_weight_and_bias(affine)) for layer, (its, affine) in found.items()},
    )
    return found


def _stitched_sums(
    encoder: M3BertModel,
    tokenized: TokenizedTexts,
    tokens: TokenFeatures | None,
    depths: Sequence[int],
    targets: Sequence[torch.Tensor],
    encode: Callable[..., States],
    description: str | None,
) -> ExitSums:
    """What the exits of stitched depths are fitted from; `targets` are those of the groups' sampled texts."""
    widths: dict[Name, int] = dict.fromkeys(depths, encoder.config.hidden_size) | {TARGET: targets[0].shape[1]}
    if tokens is not None:
        widths[FEATURES] = tokens.width
    sums = ExitSums(widths, len(tokenized))  # the same folds and held-out texts as those of the table
    groups = [_sampled(group, tokenized, STITCHED_TEXTS) for group in tokenized]
    with _raw_states(encoder, stitched=True):
        encoded = _encoded(groups, sum(map(len, groups)), encode, depths, description)
        for (group, pooled), target in zip(encoded, targets, strict=True):
            rows: dict[Name, torch.Tensor] = {layer: pooled[layer] for layer in depths} | {TARGET: target}
            if tokens is not None:
                rows[FEATURES] = tokens.means([its.ids for its in group]).to(target.device)
            sums.add([its.text for its in group], rows)
    sums.over_ranks()
    return sums


def _weight_and_bias(affine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return affine[1:].T, affine[0]
