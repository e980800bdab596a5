"""Puts a fit into its model, and measures what its depths keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..encode.states import StateKey, StateOnly
from ..modeling.configuration_elastic import Elasticity
from ..models.anatomy import store_anatomy
from .encode import Encoded
from .plan import FitPlan
from .record import ExitFit
from .ridge import weight_and_bias
from .solve import AfterLast, Solution


@contextmanager
def without_depths(encoder: Any) -> Iterator[None]:
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


def install(plan: FitPlan, encoded: Encoded, solution: Solution) -> ExitFit:
    """Put the depths into the encoder, measure them, and write the record of the fit into its config."""
    set_depths(plan, encoded, solution)
    fit = record_of(plan, encoded, solution, retrieval_of(plan, encoded, solution))
    store_record(plan, encoded.passes.raw.encoder, fit)
    return fit


def store_record(plan: FitPlan, encoder: Any, fit: ExitFit) -> None:
    """Write the record of a fit into the config of its encoder, and what follows from it."""
    replace(Elasticity.of(encoder.config), fit=fit.record()).declare(encoder.config)
    declare(plan, encoder, fit)
    store_anatomy(encoder)


def set_depths(plan: FitPlan, encoded: Encoded, solution: Solution) -> None:
    """Put exits, paths and the static table into the encoder. A path has the exit of the last layer, if it has one."""
    maps, tokens, last = solution.maps, encoded.passes.tokens, plan.last
    exits = {depth: fit.affine for depth, fit in maps.state_only.items()}
    joints = {depth: fit.affine for depth, fit in maps.joints.items()}
    if solution.last_exit is not None:
        exits |= dict.fromkeys([last, *solution.paths], solution.last_exit)
    if last in joints:
        joints |= dict.fromkeys(solution.paths, joints[last])
    encoded.passes.raw.encoder.set_depths(
        exits={depth: weight_and_bias(affine) for depth, affine in exits.items()},
        joints={depth: weight_and_bias(affine) for depth, affine in joints.items()},
        paths={depth: (path.fit.layers, path.tensors) for depth, path in solution.paths.items()},
        table=None if tokens is None or maps.table is None else tokens.table(maps.table.affine),
        ignored_ids=() if tokens is None else tokens.ignored,
    )


def retrieval_of(plan: FitPlan, encoded: Encoded, solution: Solution) -> dict[int, float]:
    """The share of the retrieval that each depth keeps, as in [`ExitFit`]: `-l` is depth l without the table."""
    spec = Elasticity.of(encoded.passes.raw.encoder.config)
    prefixes = [*([0] if plan.options.static else []), *solution.maps.state_only]
    depths: list[StateKey] = [*prefixes, *solution.paths, *(StateOnly(depth) for depth in spec.table if depth)]
    pooled = encoded.passes.raw.pooled(solution.queries.ids, depths, exits=True)
    after = AfterLast(plan.staying)
    retrieval: dict[int, float] = {}
    for key, vectors in pooled.items():
        name = -key.depth if isinstance(key, StateOnly) else key
        retrieval[name] = solution.queries.measured(after(vectors)).retrieval
    return dict(sorted(retrieval.items()))


def record_of(plan: FitPlan, encoded: Encoded, solution: Solution, retrieval: dict[int, float]) -> ExitFit:
    """The record of a fit."""
    options, maps, passes = plan.options, solution.maps, encoded.passes
    fits = ({} if maps.table is None else {0: maps.table}) | maps.state_only | maps.joints
    to_target = None
    if options.teacher is not None and (options.basis != "last_layer" or options.teacher.width > maps.width):
        to_target = maps.to_space[:, : maps.dim].T.float().cpu()
    return ExitFit(
        layers={layer: fits[layer].report for layer in sorted(fits)},
        state_only={layer: maps.state_only[layer].report for layer in maps.joints},
        pooling=plan.pooling,
        basis=options.basis,
        target="last layer" if options.teacher is None else options.teacher_name,
        dim=maps.dim,
        texts=len(passes.texts),
        sources=passes.texts.counts,
        fingerprint=passes.texts.fingerprint,
        max_length=plan.max_length,
        prompts=plan.prompts,
        features=0 if passes.tokens is None else passes.tokens.width,
        paths={depth: path.fit for depth, path in solution.paths.items()},
        candidates={depth: choice.compared for depth, choice in solution.choices.items()},
        retrieval=retrieval,
        to_target=to_target,
    )


def declare(plan: FitPlan, encoder: Any, fit: ExitFit) -> None:
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
        config.matryoshka_layers = sorted([*plan.layers, *fit.paths, plan.last])
        encoder.embedding_settings = replace(
            plan.settings, pooling=plan.pooling, projection=None, max_length=plan.longest
        )
