"""
Depths in closed form: paths, which skip layers and end in the last ones; prefixes, each with one ridge regression from
its pooled hidden state to the embedding of the last layer; and a table with one row per token of the vocabulary.

Every depth of the encoder then embeds into the same space, without any training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.teacher import TeacherEmbeddings
from ..encode.identity import encoder_parts
from ..encode.projection import Projection
from ..encode.ranks import rank, world_size
from ..encode.states import Pooling, check_pooling, longest_text, state_only
from ..encode.tokenized_texts import TokenizedTexts
from ..modeling.configuration_elastic import Elasticity
from ..modeling.modeling_elastic import make_elastic
from ..models.anatomy import store_anatomy
from ..models.settings import EmbeddingSettings
from ..utils.hashing import weights_fingerprint
from .choice import Queries, candidates_of, choose
from .kept import KeptParts
from .passes import PATH_TEXTS, RawStates, TextPasses, token_features
from .paths import Tensors, fit_paths
from .ridge import apply_affine, weight_and_bias
from .spans import QUERIES
from .sums import ExitMaps, LayerFit, PathFit
from .token_features import check_tokenizer


BASES = ("last_layer", "principal")
REFIT_TEXTS = 3000  # for the refits of paths: about 200,000 tokens
# For the estimate of the time: tokens of a span, layers that cost as much as a refit, all lists per list with one gap.
SPAN_TOKENS, GRAM_LAYERS, LISTS = 14, 4, 4
Sources = Mapping[str, Iterable[str]]


@dataclass(frozen=True)
class ExitFit:
    """
    Record of the fit of a model's depths, which is saved in its config under `elastic`.

    Args:
        layers (`dict[int, LayerFit]`): Layer -> the fit of its exit, for prefixes and the table; with a teacher, for
            the last layer, too.
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
        paths (`dict[int, PathFit]`): Depth -> the fit of its path.
        candidates (`dict[int, dict[str, float]]`): Depth -> lists of layers that were compared for it -> the share of
            the retrieval that they keep after a quick refit ([`retrieval_kept`]), the chosen one first.
        retrieval (`dict[int, float]`): Depth -> the share of the retrieval that it keeps; `-l` is depth l without the
            table.
        to_target (`torch.Tensor` of shape `(dim, target dims)`, *optional*): With a teacher that is wider than the
            model, or the principal basis: `vectors @ to_target` are in the teacher's space. It is not in the config.
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
    paths: Mapping[int, PathFit]
    candidates: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    retrieval: Mapping[int, float] = field(default_factory=dict)
    to_target: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """The fit as JSON values, with four digits of each number."""
        values = {name: its for name, its in asdict(self).items() if name != "to_target"}
        return json.loads(json.dumps(values), parse_float=lambda text: float(f"{float(text):.4g}"))


@torch.no_grad()
def fit_exits(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str] | Sources,
    *,
    layers: Sequence[int] | None = None,
    paths: Mapping[int, Sequence[int]] | None = None,
    depths: Sequence[int] = (),
    pooling: Pooling | None = None,
    static: bool = True,
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
) -> ExitFit:
    """
    Fit the depths of an encoder in closed form and put them into it; it becomes elastic. Earlier depths are replaced.
    Memory does not grow with the number of texts, and all ranks share the work.

    1. The texts are tokenised once, and the share p_t of each token t is counted.
    2. Each token of the vocabulary is encoded as a text of its own: s_t. With its input embedding e_t, both also
       weighted by a / (a + p_t), it has the features phi_t.
    3. The texts are encoded once.
    4. Depth 0: a ridge regression from the mean of phi over a text's tokens to its L2-normalised embedding at the
       last layer. It gives the static table T, one row per token: depth 0 of a text is the mean of its tokens' rows.
    5. Depth l: a ridge regression from [pooled hidden state of l, mean of T] to the same target; beside it, one from
       the hidden state alone, which a native export uses.
    6. Paths: for each depth in `depths`, several lists of layers are compared ([`m3bert.exits.choice`]). The layers
       before the gaps of the best ones are then refitted on the tokens of 3,000 texts ([`fit_paths`]). A path ends in
       the last layers, so it has no exit, unless the last layer has one, which is then that of the path, too.

    The penalty of each regression is the one that keeps most of the nearest ten texts, on at most 2,000 held-out
    texts; the final fit uses all texts. Predictions are scaled to the variances of the target
    ([`Regression.match_variances`]).

    Args:
        model ([`~transformers.PreTrainedModel`]): The encoder, whole or with a head. It is changed in place.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        texts (`Iterable[str]` or `Mapping[str, Iterable[str]]`): Unlabelled texts, or several sources of texts by
            name. Empty texts are skipped. Queries should be among them if the model is to embed queries.
        layers (`Sequence[int]`, *optional*): Depths that run the first layers, below the last. With a static table,
            depth 0 is always among them. Default: none if there are `paths` or `depths`, else all of them.
        paths (`Mapping[int, Sequence[int]]`, *optional*): Depth -> its layers, counted from 1, the last of which is
            the model's.
        depths (`Sequence[int]`, *optional*): Depths whose layers are chosen. Depth 1 runs the first layer.
        pooling (`str`, *optional*): `"mean"`, `"cls"` or `"lasttoken"`. Default: as the model was published, else the
            mean.
        static (`bool`, *optional*, defaults to `True`): Whether the exits read a static table, too. It needs a fast
            tokenizer, and a pass over its vocabulary.
        basis (`str`, *optional*, defaults to `"last_layer"`): Basis of the common space. `"last_layer"` leaves the
            last layer as it is. `"principal"` rotates it to the principal components of its embeddings; full-size
            cosines do not change, and the rotation is stored as the exit of the last layer.
        projection ([`Projection`], *optional*): Projection of the last layer that the model was published with. In an
            m3BERT it becomes the exit of the last layer. In any other encoder it stays what it is, and the exits map
            into the space in front of it.
        teacher ([`TeacherEmbeddings`], *optional*): Embeddings of the texts by another encoder, to predict in place of
            the last layer's; the last layer gets an exit, too. They are found by text. Embeddings wider than the model
            are reduced to their principal components, and `to_target` of the result maps back.
        teacher_name (`str`, *optional*, defaults to `"teacher"`): Name of the teacher, for the record.
        max_length (`int`, *optional*): Maximum length of a text in tokens. Default: as the model was published, else
            its limit.
        prompts (`Sequence[str]`, *optional*): Prompts that are put before the texts in turn, for encoders that were
            trained with prompts. Default: those that the model was published with, else none.
        batch_size (`int`, *optional*, defaults to 64): Number of texts of 128 tokens to encode at a time: more shorter
            texts, fewer longer ones. A CPU encodes at most 4,096 tokens at a time.
        compute_dtype (`torch.dtype`, *optional*): Type of the encoder's matrix products: `torch.bfloat16` or
            `torch.float16` (mixed precision). Default: the type of the weights. The fit itself is in float64.
        cache_dir (`str` or `Path`, *optional*): Folder that keeps finished parts, such as the embeddings of the
            vocabulary's tokens, for when an interrupted fit is called again and for the next one. A part is used for
            the same encoder, tokenizer, texts, targets and options only. Default: nothing is kept.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.

    Returns:
        [`ExitFit`]

    Raises:
        ValueError: if the encoder cannot skip layers, a depth is outside it, the tokenizer is not the model's or
            cannot give a static table, there are fewer texts than dims, a teacher has no embedding of a text, or one
            that is zero or not finite, the projection of a model that is no m3BERT would follow exits into a teacher's
            space, or a hidden state is not finite (the message names the layer and a text, or the token).
    """
    encoder = model.base_model
    config, training = encoder.config, encoder.training
    settings = EmbeddingSettings.of(encoder) or EmbeddingSettings()
    pooling = pooling or settings.pooling
    query_prompt = settings.prompts.get("query", "") if prompts is None else [*prompts, ""][0]
    if prompts is None:
        prompts = list(dict.fromkeys(settings.prompts.values())) or [""]
    check_pooling(pooling)
    if basis not in BASES:
        raise ValueError(f"basis={basis!r} is unknown; legal values: {', '.join(BASES)}.")
    if teacher is not None:
        if settings.projection is not None and config.model_type != "m3bert":
            raise ValueError(
                "The projection of the model stays behind its exits, so they cannot predict a teacher: convert the "
                "model first (m3bert convert)."
            )
        projection = None
    elif projection is None:
        projection = Projection.of(settings.projection)
    depth, width = config.num_hidden_layers, config.hidden_size
    given = {length: [*its] for length, its in sorted((paths or {}).items())}
    routes = {length: its for length, its in given.items() if its != [*range(1, length + 1)]}
    chosen = [length for length in sorted({*depths} - {*given}) if candidates_of(length, depth)]
    if layers is None:
        layers = [] if given or depths else range(1, depth)
    layers = sorted({*layers, *depths, *given, *([0] if static else [])} - {*routes, *chosen, depth})
    some = routes | {length: [*candidates_of(length, depth)[0]] for length in chosen}
    Elasticity(some, layers, [0] if static else []).validate(config)
    if static:
        check_tokenizer(tokenizer, config.vocab_size)
    if max_length is None:
        max_length = longest_text(config, tokenizer, settings.max_length)
    if max_length < 1:
        raise ValueError(f"max_length={max_length} must be at least 1.")
    stays = projection is not None and config.model_type != "m3bert"
    if stays and basis != "last_layer":
        raise ValueError("The projection of the model stays as it is, so its last layer cannot be rotated.")

    sources = texts if isinstance(texts, Mapping) else {"texts": texts}
    tokenized = TokenizedTexts(sources, tokenizer, max_length, prompts)
    if len(tokenized) < width:
        raise ValueError(
            f"{len(tokenized)} texts are too few to fit exits of {width} dims: {width} texts are the minimum, and "
            f"{20 * width} or more are better."
        )
    target = weights_fingerprint([] if projection is None else projection.state_dict().items())
    if teacher is not None:
        # Group by group, so that memory does not grow with the number of texts.
        target = weights_fingerprint(("", teacher.checked([its.text for its in group])) for group in tokenized)
    make_elastic(model)
    kept = encoder.elastic, config.elastic if hasattr(config, "elastic") else None
    try:
        encoder.eval()
        encoder.set_depths()
        raw = RawStates(encoder, tokenizer, pooling, batch_size, compute_dtype)
        if description is not None and rank() == 0:
            tqdm.write(_cost(raw, tokenized, tokenizer if static else None, [*routes, *chosen]))
        # The pooler is not read, and many checkpoints leave it to chance.
        identity = {
            **encoder_parts(model, tokenizer, without=("elastic", "pooler")),
            "pooling": pooling,
            "compute_dtype": str(compute_dtype or encoder.dtype),
        }
        tokens = None
        if static:
            tokens = token_features(raw, tokenized, prompts, cache_dir, identity, progress=description is not None)
        passes = TextPasses(raw, tokenized, tokens, description)
        settled = [layers, routes, chosen, static, max_length, query_prompt, list(prompts)]
        data = [tokenized.fingerprint, tokenized.counts, target]
        kept_parts = KeptParts(cache_dir, {**identity, "settled": settled, "data": data}, encoder.device)
        sums, targets = kept_parts("sums", lambda: passes.sums(layers, projection, teacher))
        maps = ExitMaps(sums, basis, config, projection if stays else None)
        exits = {layer: its.affine for layer, its in maps.state_only.items()}
        joints = {layer: its.affine for layer, its in maps.joints.items()}
        if teacher is None and not stays and (basis != "last_layer" or projection is not None):
            last = torch.eye(width).to(maps.to_space) if projection is None else projection.weight.to(maps.to_space)
            exits[depth] = torch.nn.functional.pad(last.T, (0, 0, 1, 0)) @ maps.to_space

        def after(states: torch.Tensor) -> torch.Tensor:
            """What follows the last layer."""
            if stays and projection is not None:
                return projection.to(states.device)(states.float())
            return apply_affine(exits[depth], states.double()) if depth in exits else states

        groups = passes.sampled(PATH_TEXTS)  # a teacher has no embeddings of spans
        asked = targets
        if teacher is None:
            groups = passes.spans(query_prompt, max_length)
            asked = kept_parts("spans", lambda: passes.targets(groups, projection))
        queries = Queries.of(zip(groups, asked, strict=True), torch.cat(targets))
        if not stays:
            wanted, passages = queries.wanted @ maps.to_space, queries.passages @ maps.to_space
            queries = replace(queries, wanted=wanted, passages=passages)
        compared: dict[int, dict[tuple[int, ...], float]] = {}
        fitted: dict[int, tuple[PathFit, Tensors]] = {}
        if chosen or routes:
            some_texts, label = passes.sampled(REFIT_TEXTS), description and "Refitting layers"
            if chosen:
                compared = kept_parts("choice", lambda: choose(raw, chosen, some_texts, queries, after, label))
                best = {length: [*next(iter(its))] for length, its in compared.items()}
                routes = dict(sorted({**routes, **best}.items()))
            refits = kept_parts("refits", lambda: fit_paths(raw, some_texts, routes.values(), label))
            fitted = dict(zip(routes, refits, strict=True))
            for maps_of in (exits, joints):
                maps_of |= dict.fromkeys(fitted, maps_of[depth]) if depth in maps_of else {}

        def put(fit: Mapping[str, Any] | None = None) -> None:
            encoder.set_depths(
                exits={layer: weight_and_bias(affine) for layer, affine in exits.items()},
                joints={layer: weight_and_bias(affine) for layer, affine in joints.items()},
                paths={length: (its.layers, tensors) for length, (its, tensors) in fitted.items()},
                table=None if tokens is None or maps.table is None else tokens.table(maps.table.affine),
                ignored_ids=() if tokens is None else tokens.ignored,
                fit=fit,
            )

        put()
        readable = [*([0] if static else []), *maps.state_only, *fitted, *map(state_only, joints)]
        measured = {}
        for length, vectors in sorted(raw.pooled(queries.ids, readable, exits=True).items()):
            if stays and projection is not None:
                vectors = projection.to(vectors.device)(vectors.float())
            measured[length] = queries.measured(vectors)
        read = ({} if maps.table is None else {0: maps.table}) | maps.state_only | maps.joints
        fit = ExitFit(
            layers={layer: read[layer].report for layer in sorted(read)},
            state_only={layer: maps.state_only[layer].report for layer in maps.joints},
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
            paths={layer: its for layer, (its, _) in fitted.items()},
            candidates={
                length: {",".join(map(str, layers)): kept for layers, kept in found.items()}
                for length, found in compared.items()
            },
            retrieval={length: its.kept for length, its in measured.items()},
            to_target=maps.to_space[:, : maps.dim].T.float().cpu()
            if teacher is not None and (basis != "last_layer" or teacher.width > width)
            else None,
        )
        put(fit.record())
        store_anatomy(encoder)
    except BaseException:
        encoder.elastic, config.elastic = kept
        raise
    finally:
        encoder.train(training)
    if config.model_type == "m3bert":
        config.matryoshka_layers = sorted([*layers, *fitted, depth])
    if stays:
        config.elastic["reads_all_dims"] = True
    elif maps.dim < width:
        config.output_dim = maps.dim
        config.matryoshka_dims = [dim for dim in getattr(config, "matryoshka_dims", None) or [] if dim <= maps.dim]
    elif config.model_type != "m3bert":  # an earlier fit may have had a narrower target
        config.output_dim = None
    if config.model_type == "m3bert":  # the exits hold the projection now
        longest = longest_text(config, tokenizer, settings.max_length)
        encoder.embedding_settings = replace(settings, pooling=pooling, projection=None, max_length=longest)
    return fit


def _cost(
    raw: RawStates, texts: TokenizedTexts, vocabulary: PreTrainedTokenizerBase | None, depths: Sequence[int]
) -> str:
    """What a fit will do, and about how long it takes, by one batch of the texts."""
    last, count = raw.encoder.config.num_hidden_layers, len(texts)
    tokens, refit = texts.tokens, texts.tokens * min(1, REFIT_TEXTS / count)
    rows = len(vocabulary) if vocabulary is not None else 0
    cost = (tokens + 4 * rows) * last  # in tokens and layers
    if depths:
        lists = sum(map(len, (candidates_of(length, last) for length in depths))) * LISTS
        cost += refit * (last + GRAM_LAYERS * (last / 4 + len(depths)))
        cost += SPAN_TOKENS * min(count, PATH_TEXTS) * QUERIES * lists * last
    ids = [its.ids for its in next(iter(texts), [])[:64]]
    raw.pooled(ids[:8], [last])  # the first call is slower
    start = time.perf_counter()
    raw.pooled(ids, [last])
    minutes = cost / max(1, sum(map(len, ids)) * last) * (time.perf_counter() - start) / 60 / world_size()
    of_vocabulary = f", {rows:,} tokens of the vocabulary" if rows else ""
    of_paths = f", {len(depths)} paths" if depths else ""
    return f"About {max(1, round(minutes))} min: {count:,} texts ({tokens:,} tokens){of_vocabulary}{of_paths}."
