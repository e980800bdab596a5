"""
Exits in closed form: one ridge regression per layer, from its pooled hidden state to the embedding of the last layer,
and a table with one row per token of the vocabulary that they read beside it.

Every depth of the encoder then embeds into the same space, without any training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from modeling_m3bert import EmbeddingSettings, M3BertModel
from modeling_m3bert.conversion_m3bert import refuse_unrepresentable

from ..core.projection import Projection
from ..core.states import Pooling, check_pooling, longest_text, max_positions
from ..data.teacher import TeacherEmbeddings
from ..data.token_features import check_tokenizer
from ..data.tokenized_texts import TokenizedTexts
from .maps import ExitMaps
from .passes import RawStates, States, TextPasses, token_features
from .ridge import weight_and_bias
from .stitches import (
    Stitches,
    StitchFit,
    fit_stitches,
    install_stitches,
    restored_on_error,
    stitch_weights,
    top_layers_of,
)
from .sums import LayerFit


BASES = ("last_layer", "principal")
Sources = Mapping[str, Iterable[str]]


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
    raw = RawStates(encoder, tokenizer, pooling, batch_size, compute_dtype)
    tokens = None
    if static:
        tokens = token_features(raw, tokenized, cache_dir, progress=description is not None)
    passes = TextPasses(raw, tokenized, tokens, description)
    sums, targets = passes.sums(layers, projection, teacher, on_states, stitched=bool(tops))
    maps = ExitMaps(sums, basis, encoder.config)
    maps.add(sums)
    table: dict[str, Any] = {}
    if tokens is not None and maps.table is not None:
        table = {"static_table": tokens.table(maps.table.affine), "static_ignored_ids": tokens.ignored}
    stitched: dict[int, tuple[StitchFit, torch.Tensor]] = {}
    if tops:
        stitched = fit_stitches(passes, tops, table.get("static_table"))
        with restored_on_error(encoder):
            install_stitches(encoder, stitched, **table)
            maps.add(passes.stitched_sums([*tops], targets))

    exits = {layer: its.affine for layer, its in maps.state_only.items()}
    if teacher is None and (basis != "last_layer" or projection is not None):
        last = torch.eye(width).to(maps.to_space) if projection is None else projection.weight.to(maps.to_space)
        exits[depth] = torch.nn.functional.pad(last.T, (0, 0, 1, 0)) @ maps.to_space
    encoder.set_exits(
        {layer: weight_and_bias(affine) for layer, affine in exits.items()},
        joints={layer: weight_and_bias(its.affine) for layer, its in maps.joints.items()},
        stitches=stitch_weights(stitched),
        **table,
    )
    read = ({} if maps.table is None else {0: maps.table}) | maps.state_only | maps.joints
    fit = ExitFit(
        layers={layer: read[layer].report for layer in sorted(read)},
        state_only={  # no stitched native export
            layer: maps.state_only[layer].report for layer in maps.joints if layer not in tops
        },
        pooling=pooling,
        basis=basis,
        target="last layer" if teacher is None else teacher_name,
        dim=maps.dim,
        texts=len(tokenized),
        sources=tokenized.counts,
        fingerprint=tokenized.fingerprint,
        max_length=max_length,
        prompts=list(prompts),
        features=0 if tokens is None else tokens.width,
        stitches={layer: its for layer, (its, _) in stitched.items()},
    )
    config = encoder.config
    config.exit_fit, config.matryoshka_layers = fit.record(), sorted([*layers, *tops, depth])
    if fit.dim < width:
        config.output_dim = fit.dim
        config.matryoshka_dims = [dim for dim in config.matryoshka_dims if dim <= fit.dim]
    if published is not None:  # the exits hold the projection now
        longest = longest_text(config, tokenizer, published.max_length)
        encoder.embedding_settings = replace(published, pooling=pooling, projection=None, max_length=longest)
    return fit


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
