"""Puts a fit into its model, and measures what its depths keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from ..encode.states import StateKey, StateOnly
from ..modeling.configuration_elastic import Elasticity
from ..models.anatomy import store_anatomy
from .plan import FitPlan
from .read_texts import ReadTexts
from .record import ChosenLayers, ExitFit, RefittedPath, installed
from .ridge import weight_and_bias
from .solve import AfterLast, Solution
from .tokenized_texts import TokenizedTexts


@contextmanager
def without_depths(encoder: PreTrainedModel) -> Iterator[None]:
    """An elastic encoder in evaluation mode, without its depths and the sizes that follow from them. If the block does
    not end, it has them again."""
    training, parts, config = encoder.training, encoder.elastic, encoder.config
    values = {**vars(config)}
    earlier = {**(getattr(config, "elastic", None) or {})}
    earlier.pop("reads_all_dims", None)
    try:
        encoder.eval()
        config.elastic = earlier
        if earlier.get("fit") and earlier["fit"].get("dim") == getattr(config, "output_dim", None):
            config.output_dim = None
        encoder.set_depths()
        yield
    except BaseException:
        encoder.elastic = parts
        vars(config).clear()
        vars(config).update(values)
        raise
    finally:
        encoder.train(training)


def install(plan: FitPlan, read: ReadTexts, solution: Solution) -> ExitFit:
    """Put the depths into the encoder, measure them, and write the record of the fit into its config."""
    set_depths(plan, read, solution)
    retrieval, of_exits = retrieval_of(plan, read, solution), record_of_exits(plan, read, solution)
    texts, encoder = read.passes.texts, read.passes.raw.encoder
    return store_record(plan, encoder, texts, solution.paths, solution.choices, retrieval, **of_exits)


def store_record(
    plan: FitPlan,
    encoder: PreTrainedModel,
    texts: TokenizedTexts,
    paths: Mapping[int, RefittedPath],
    choices: Mapping[int, ChosenLayers],
    retrieval: Mapping[int, float],
    **of_exits: Any,
) -> ExitFit:
    """Write the record of a fit into the config of its encoder, and what follows from it. `of_exits` are the fields of
    [`ExitFit`] that paths alone do not have."""
    fit = ExitFit(
        basis=plan.options.basis,
        texts=len(texts),
        sources=texts.counts,
        fingerprint=texts.fingerprint,
        max_length=plan.max_length,
        prompts=plan.prompts,
        paths={depth: path.fit for depth, path in paths.items()},
        candidates={depth: choice.compared for depth, choice in choices.items()},
        retrieval=retrieval,
        **of_exits,
    )
    replace(Elasticity.of(encoder.config), fit=fit.record()).declare(encoder.config)
    declare(plan, encoder, fit)
    store_anatomy(encoder)
    return fit


def set_depths(plan: FitPlan, read: ReadTexts, solution: Solution) -> None:
    """Put exits, paths and the static table into the encoder. A path has the exit of the last layer, if it has one."""
    maps, tokens, last = solution.maps, read.passes.tokens, plan.last
    exits = {depth: fit.affine for depth, fit in maps.state_only.items()}
    joints = {depth: fit.affine for depth, fit in maps.joints.items()}
    if solution.last_exit is not None:
        exits |= dict.fromkeys([last, *solution.paths], solution.last_exit)
    if last in joints:
        joints |= dict.fromkeys(solution.paths, joints[last])
    read.passes.raw.encoder.set_depths(
        exits={depth: weight_and_bias(affine) for depth, affine in exits.items()},
        joints={depth: weight_and_bias(affine) for depth, affine in joints.items()},
        paths=installed(solution.paths),
        table=None if tokens is None or maps.table is None else tokens.table(maps.table.affine),
        ignored_ids=() if tokens is None else tokens.ignored,
    )


def retrieval_of(plan: FitPlan, read: ReadTexts, solution: Solution) -> dict[int, float]:
    """The share of the retrieval that each depth keeps, as in [`ExitFit`]: `-l` is depth l without the table."""
    spec = Elasticity.of(read.passes.raw.encoder.config)
    prefixes = [*([0] if plan.options.static else []), *solution.maps.state_only]
    depths: list[StateKey] = [*prefixes, *solution.paths, *(StateOnly(depth) for depth in spec.table if depth)]
    pooled = read.passes.raw.pooled(solution.queries.ids, depths, exits=True)
    after = AfterLast(plan.staying)
    retrieval: dict[int, float] = {}
    for key, vectors in pooled.items():
        name = -key.depth if isinstance(key, StateOnly) else key
        retrieval[name] = solution.queries.measured(after(vectors)).retrieval
    return dict(sorted(retrieval.items()))


def record_of_exits(plan: FitPlan, read: ReadTexts, solution: Solution) -> dict[str, Any]:
    """The fields of [`ExitFit`] of exits and the table."""
    options, maps, space, tokens = plan.options, solution.maps, solution.maps.space, read.passes.tokens
    fits = {**({} if maps.table is None else {0: maps.table}), **maps.state_only, **maps.joints}
    to_target = None
    if options.teacher is not None:
        if options.basis != "last_layer" or options.teacher.width > plan.config.hidden_size:
            to_target = space.to_space[:, : space.dim].T.float().cpu()
    return {
        "layers": {layer: fits[layer].report for layer in sorted(fits)},
        "state_only": {layer: maps.state_only[layer].report for layer in maps.joints},
        "pooling": plan.pooling,
        "target": "last layer" if options.teacher is None else options.teacher_name,
        "dim": space.dim,
        "features": 0 if tokens is None else tokens.width,
        "to_target": to_target,
    }


def declare(plan: FitPlan, encoder: PreTrainedModel, fit: ExitFit) -> None:
    """Write into the config of the encoder what follows from a fit: its sizes, and that an exit holds its projection
    now."""
    config = encoder.config
    if plan.staying is not None:
        config.elastic["reads_all_dims"] = True
    elif fit.dim < config.hidden_size:
        config.output_dim = fit.dim
        config.matryoshka_dims = [dim for dim in getattr(config, "matryoshka_dims", None) or [] if dim <= fit.dim]
    elif not plan.is_m3bert:  # an earlier fit may have had a narrower target
        config.output_dim = None
    if plan.is_m3bert:
        config.matryoshka_layers = sorted([*plan.prefixes, *fit.paths, plan.last])
        encoder.embedding_settings = replace(
            plan.settings, pooling=plan.pooling, projection=None, max_length=plan.longest
        )
