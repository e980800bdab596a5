"""Paths of native encoders: their refit against a naive one, and what a fit with paths gives."""

import copy
from hashlib import blake2b

import numpy as np
import pytest
import torch
from transformers import AutoModel

from m3bert.encode.states import nested_states
from m3bert.exits import choice, layer_rows, paths, refit
from m3bert.exits.centred import Centring
from m3bert.exits.layer_lists import gaps_of
from m3bert.exits.queries import Measured, Queries
from m3bert.exits.raw_states import RawStates
from m3bert.exits.record import PathFit, RefittedPath
from m3bert.exits.tokenized_texts import TokenizedTexts
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.modeling.modeling_elastic import make_elastic
from m3bert.modeling.parts_elastic import layer_list, replaced
from m3bert.models.anatomy import hidden_of, run_native
from m3bert.models.feed_forward import feed_forward_of
from m3bert.trainers import TeacherEmbeddings, fit_exits
from tests.elastic_repositories import config_of
from tests.exits.test_fit import random_texts


FAMILIES = ("bert", "modernbert", "qwen3")  # post-norm, pre-norm and gated, causal


def tiny(family: str, tokenizer) -> torch.nn.Module:
    """A random encoder of six layers whose layers change the hidden state a good deal."""
    torch.manual_seed(3)
    config = config_of(family, intermediate_size=128, vocab_size=len(tokenizer))
    return AutoModel.from_config(config).eval()


@pytest.fixture(params=FAMILIES)
def encoder(request, tiny_tokenizer) -> torch.nn.Module:
    return tiny(request.param, tiny_tokenizer)


def groups_of(tokenizer, count: int = 200) -> list:
    return list(TokenizedTexts({"texts": random_texts(count)}, tokenizer, 40, [""]))


def test_a_solution_and_the_rise_of_its_error_without_an_input_equal_a_solve_with_all_rows():
    draw = np.random.default_rng(0)
    x, t = draw.normal(size=(80, 6)) * [1, 2, 3, 0.1, 1, 1], draw.normal(size=(80, 3))
    gram, cross = torch.from_numpy(x.T @ x), torch.from_numpy(x.T @ t)

    def naive(inputs):
        """The solution with rows for the penalty below the rows of the texts, and its error."""
        penalty = np.diag(np.sqrt(1e-2 * (x**2).sum(0)))[:, inputs]
        rows, targets = np.concatenate([x[:, inputs], penalty]), np.concatenate([t, np.zeros((6, 3))])
        weights = np.linalg.lstsq(rows, targets, rcond=None)[0]
        return weights, ((targets - rows @ weights) ** 2).sum()

    weights, rises = refit.ridge_through_origin(gram, cross, 1e-2)
    expected, error = naive([*range(6)])
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    without = [naive([number for number in range(6) if number != gone])[1] - error for gone in range(6)]
    np.testing.assert_allclose(rises, without, rtol=1e-6)


def test_units_that_the_target_needs_are_shortlisted_and_stay():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(500, 40))
    x[:, 0] = 1
    needed = [0, 2, 17, 31]
    t = x[:, needed] @ draw.normal(size=(4, 8)) + 0.1 * draw.normal(size=(500, 8))
    gram, cross = torch.from_numpy(x.T @ x), torch.from_numpy(x.T @ t)
    short = refit.shortlist(gram[:, :6], cross, gram.diagonal(), 5)
    assert short[:6].tolist() == [*range(6)] and len(short) == 11 and {17, 31} <= {*short.tolist()}
    assert refit.eliminate(gram, cross, 3).tolist() == needed


def rows_of(encoder, tokenizer, layers) -> dict[str, torch.Tensor]:
    """What the layer before the first gap reads and gives, of each token, read text by text from the source, with what
    the next layer reads there."""
    ends, source = feed_forward_of(encoder), layer_list(encoder, 6)[1]
    place = gaps_of(layers)[0]
    layer, before, seen = source[layers[place] - 1], source[layers[place + 1] - 2], {}
    layer.get_submodule(ends.output).register_forward_hook(lambda m, a, o: seen.update(g=a[0], o=o))
    layer.get_submodule(ends.inner.names[0]).register_forward_hook(lambda m, a, o: seen.update(x=a[0]))
    for name, module in (("end", layer), ("z", before)):
        if ends.norm:
            hooked = module.get_submodule(ends.norm)
            hooked.register_forward_pre_hook(lambda m, a, name=name: seen.update({name: a[0]}))
        else:
            module.register_forward_hook(lambda m, a, o, name=name: seen.update({name: hidden_of(o)}))
    rows = {name: [] for name in ("x", "g", "y", "z", "held")}
    for text in (text for group in groups_of(tokenizer) for text in group):
        with torch.no_grad():
            run_native(encoder, input_ids=torch.tensor([text.ids]))
        held = blake2b(text.text.encode(), digest_size=1).digest()[0] < layer_rows.HELD_OUT * 256
        seen["y"], seen["held"] = seen["end"] - seen["o"], torch.full((1, len(text.ids), 1), held)
        for name, values in rows.items():
            values.append(seen[name][0, int(encoder.config.model_type == "qwen3") :])
    return {name: torch.cat(values) for name, values in rows.items()}


def test_a_refit_is_the_ridge_regression_over_tokens(encoder, tiny_tokenizer):
    raw = RawStates(encoder, tiny_tokenizer, "mean", 64)
    for layers in ([1, 2, 4, 5, 6], [1, 2, 3, 6]):
        (path,) = paths.fit_paths(raw, groups_of(tiny_tokenizer), [layers])
        place = gaps_of(layers)[0]
        name, source = layer_list(encoder, 6)
        rows, ends = rows_of(copy.deepcopy(encoder), tiny_tokenizer, layers), feed_forward_of(encoder)
        before = source[layers[place + 1] - 2]
        deviation = rows["z"].std(dim=1, keepdim=True)
        start = f"{name}.{place}."
        tensors = {key.removeprefix(start): value for key, value in path.tensors.items() if key.startswith(start)}
        changed = replaced(source[layers[place] - 1], tensors)
        inner = [changed.get_submodule(linear)(rows["x"]) for linear in ends.inner.names]
        units = ends.inner.units(ends.inner.parts(inner, rows["g"].shape[1]))
        held = rows["held"][:, 0]
        x = torch.nn.functional.pad(units / deviation, (1, 0), value=0.0)
        x[:, :1] = 1 / deviation if changed.get_submodule(ends.output).bias is not None else 0
        x, target = x[~held].double(), ((rows["z"] - rows["y"]) / deviation)[~held].double()
        output = changed.get_submodule(ends.output)
        solved = [refit.ridge_through_origin(x.T @ x, x.T @ target, penalty)[0][1:].T for penalty in refit.PENALTIES]
        assert any(torch.allclose(output.weight.double(), weight, rtol=2e-2, atol=2e-2) for weight in solved)
        total = rows["y"] + output(units)
        norm = torch.nn.Identity() if ends.norm is None else before.get_submodule(ends.norm)
        made, target = ((norm(z) / (1 if ends.norm else deviation))[held] for z in (total, rows["z"]))
        explained = 1 - (made - target).square().sum() / (target - target.mean(dim=0)).square().sum()
        assert path.fit.r_squared[0] == pytest.approx(explained.item(), abs=5e-3)
        assert 0 < path.fit.borrowed[0] < units.shape[1]


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3_text"])
def test_a_refit_without_a_gap_gives_back_the_layer(family, tiny_tokenizer):
    encoder = tiny(family, tiny_tokenizer)
    reader = layer_rows.LayerReader.of(RawStates(encoder, tiny_tokenizer, "mean", 64))
    layer, ends = reader.layers[1], reader.ends
    sums = refit.Refit(ends, layer, {2: layer})
    with torch.no_grad():
        for batch in reader.batches(groups_of(tiny_tokenizer), None):
            rows = reader.read([1, 2], reader.layers, [2], batch).rows[2].of(batch.real)
            sums.add(rows, {2: rows.z}, held_out=batch.held_out)
        sums.sum_over_ranks()
        refitted = sums.best()
    assert refitted.borrowed == 0
    assert refitted.explained > (0.9 if ends.behind else 0.999)  # a norm behind W gets another scale
    if family in ("modernbert", "qwen3"):  # the matrix itself, up to the penalty
        weights = refitted.tensors[f"{ends.output}.weight"], layer.get_submodule(ends.output).weight
        torch.testing.assert_close(*weights, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("skipped", [1, 2])
def test_blocks_of_columns_give_the_gram_matrix(skipped, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(refit, "COLUMNS", 7)
    encoder = tiny("bert", tiny_tokenizer)
    reader = layer_rows.LayerReader.of(RawStates(encoder, tiny_tokenizer, "mean", 64))
    sums = refit.Refit(reader.ends, reader.layers[1], {2: reader.layers[1]}, reader.layers[2 : 2 + skipped])
    gram = torch.zeros(len(sums.gram), len(sums.gram), dtype=torch.float64)
    with torch.no_grad():
        for batch in reader.batches(groups_of(tiny_tokenizer), None):
            rows = reader.read([1, 2], reader.layers, [2], batch).rows[2].of(batch.real)
            sums.add(rows, {2: rows.z}, held_out=batch.held_out)
            if not batch.held_out:
                inputs = (sums.inputs(rows) / rows.z.std(dim=1, keepdim=True)).double()
                gram += inputs.T @ inputs
    sums.sum_over_ranks()
    assert sums.is_long == (skipped > 1)
    torch.testing.assert_close(sums.gram, gram[:, : sums.gram.shape[1]], rtol=1e-4, atol=1e-4 * float(gram.max()))


def test_a_depth_is_closer_with_a_refit_and_closer_still_with_borrowed_units(tiny_tokenizer, monkeypatch):
    encoder = make_elastic(tiny("bert", tiny_tokenizer))
    raw, layers, cosines = RawStates(encoder, tiny_tokenizer, "mean", 64), [1, 2, 6], []
    ids = [text.ids for text in groups_of(tiny_tokenizer)[0]]
    whole = raw.pooled(ids, [6])[6]
    (borrowed,) = paths.fit_paths(raw, groups_of(tiny_tokenizer), [layers])
    monkeypatch.setattr(paths, "Refit", lambda ends, layer, targets, skipped: refit.Refit(ends, layer, targets))
    (alone,) = paths.fit_paths(raw, groups_of(tiny_tokenizer), [layers])
    for tensors in ({}, alone.tensors, borrowed.tensors):
        encoder.set_depths(paths={3: (layers, tensors)})
        cosines.append(float(torch.cosine_similarity(raw.pooled(ids, [3])[3], whole).mean()))
    assert cosines[0] < cosines[1] < cosines[2]


@pytest.mark.parametrize("static", [True, False])
def test_a_path_has_the_hidden_states_of_its_layers(encoder, tiny_tokenizer, static):
    texts = random_texts(120)
    fit = fit_exits(encoder, tiny_tokenizer, texts, paths={2: [1, 6], 4: [1, 2, 5, 6]}, layers=[3], static=static)
    spec, table = Elasticity.of(encoder.config), [0] if static else []
    assert spec.depths == {2: [1, 6], 3: [1, 2, 3], 4: [1, 2, 5, 6], **dict.fromkeys(table, [])}
    assert [*fit.paths] == [2, 4] and [*fit.layers] == spec.exits == [*table, 3]
    inputs = tiny_tokenizer(texts[:5], padding=True, return_tensors="pt")
    depths = [*table, 2, 3, 4, 6]
    with torch.no_grad():
        together = nested_states(encoder, inputs, depths).layers
        for depth in depths:
            alone = encoder(**inputs, output_layer=depth).last_hidden_state
            mask = inputs["attention_mask"].bool()
            torch.testing.assert_close(together[depth][mask], alone[mask], atol=1e-5, rtol=1e-5)


def test_an_interrupted_fit_leaves_the_model_as_it_was(encoder, tiny_tokenizer, monkeypatch):
    texts = random_texts(120)
    fit_exits(encoder, tiny_tokenizer, texts, paths={2: [1, 6]})
    weights, elastic = copy.deepcopy(encoder.state_dict()), copy.deepcopy(encoder.config.elastic)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("m3bert.exits.solve.fit_paths", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_exits(encoder, tiny_tokenizer, texts, paths={4: [1, 2, 5, 6]}, static=False)
    assert encoder.config.elastic == elastic and encoder.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in encoder.state_dict().items())


@pytest.mark.parametrize("basis", ["last_layer", "principal"])
def test_a_path_has_the_exit_of_the_last_layer_alone(tiny_tokenizer, basis):
    encoder, texts = tiny("bert", tiny_tokenizer), random_texts(120)
    fit_exits(encoder, tiny_tokenizer, texts, paths={2: [1, 6]}, basis=basis, static=False)
    spec, exits = Elasticity.of(encoder.config), encoder.elastic.exits
    assert spec.exits == ([] if basis == "last_layer" else [2, 6])
    if basis == "principal":
        assert torch.equal(exits["2"].weight, exits["6"].weight) and torch.equal(exits["2"].bias, exits["6"].bias)


@pytest.mark.parametrize("closer", [True, False])
def test_a_path_gets_the_mean_of_the_whole_model_where_that_brings_queries_closer(tiny_tokenizer, monkeypatch, closer):
    encoder, groups = make_elastic(tiny("bert", tiny_tokenizer)), groups_of(tiny_tokenizer)
    raw, ids = RawStates(encoder, tiny_tokenizer, "mean", 16), [text.ids for group in groups for text in group]
    full = raw.pooled(ids, [6])[6]
    path = RefittedPath(PathFit([1, 2, 6], [], []), {})
    measures = iter([0.2, 0.1 if closer else 0.19])  # without the mean, and with it
    monkeypatch.setattr(Queries, "measured", lambda self, vectors: Measured(next(measures), 0.0))
    (result,) = Centring.of(raw, Queries(ids, full, full), torch.nn.Identity()).centred({3: path}).values()
    encoder.set_depths(paths={3: (path.fit.layers, result.tensors)})
    means = raw.pooled(ids, [3])[3].mean(dim=0), full.mean(dim=0)
    assert ([*result.tensors] == ["encoder.layer.2.output.LayerNorm.bias"]) == closer
    assert torch.allclose(*means, atol=1e-5) == result.fit.shifted == closer


def test_an_encoder_with_a_norm_after_its_layers_is_not_centred(tiny_tokenizer):
    encoder = make_elastic(tiny("modernbert", tiny_tokenizer))
    raw, paths_of = RawStates(encoder, tiny_tokenizer, "mean", 16), {3: RefittedPath(PathFit([1, 2, 6], [], []), {})}
    queries = Queries([], torch.zeros(0, 32), torch.zeros(0, 32))
    assert Centring.of(raw, queries, torch.nn.Identity()).centred(paths_of) == paths_of


@pytest.mark.parametrize("basis", ["last_layer", "principal"])
def test_paths_are_measured_with_the_exit_that_is_installed(tiny_tokenizer, monkeypatch, basis):
    texts, measured, of = sorted({*random_texts(150)}), [], Centring.of

    def recorded(raw, queries, after):
        measured.append((raw, queries.ids, after(raw.pooled(queries.ids, [6])[6])))
        return of(raw, queries, after)

    monkeypatch.setattr(Centring, "of", recorded)
    teacher = TeacherEmbeddings(texts, np.random.default_rng(0).normal(size=(len(texts), 12)).astype(np.float32))
    fit_exits(tiny("bert", tiny_tokenizer), tiny_tokenizer, texts, paths={2: [1, 6]}, teacher=teacher, basis=basis)
    ((raw, ids, vectors),) = measured
    installed = raw.pooled(ids, [6], exits=True)[6].to(vectors)
    torch.testing.assert_close(vectors, installed, atol=1e-4, rtol=1e-4)


def test_a_rank_without_queries_has_no_vectors(tiny_tokenizer):
    encoder = make_elastic(tiny("bert", tiny_tokenizer))
    raw, queries = RawStates(encoder, tiny_tokenizer, "mean", 16), Queries([], torch.zeros(0, 32), torch.ones(1, 32))
    assert raw.pooled([], [2, 6])[2].shape == (0, 32)
    assert queries.measured(raw.pooled([], [6])[6]) == Measured(0.0, 0.0)


def test_a_refit_without_held_out_tokens_says_nothing_of_its_quality(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(layer_rows, "HELD_OUT", 0.0)
    raw = RawStates(tiny("bert", tiny_tokenizer), tiny_tokenizer, "mean", 64)
    assert paths.fit_paths(raw, groups_of(tiny_tokenizer, 50), [[1, 6]])[0].fit.r_squared == [None]


def test_no_hook_stays_when_a_reading_fails(tiny_tokenizer):
    reader = layer_rows.LayerReader.of(RawStates(tiny("bert", tiny_tokenizer), tiny_tokenizer, "mean", 64))
    batch = next(iter(reader.batches(groups_of(tiny_tokenizer, 20), None)))
    modules = [*reader.layers[0].modules()]
    before = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules]
    with pytest.raises(IndexError):
        reader.read([1, 2], reader.layers, [1, 3], batch)
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules] == before


def test_quick_refits_are_those_that_a_choice_reads(tiny_tokenizer):
    raw = RawStates(tiny("bert", tiny_tokenizer), tiny_tokenizer, "mean", 64)
    assert {*choice.QuickRefits.fit(raw, groups_of(tiny_tokenizer), [2], None).tensors} == {(1, 6)}
    every = choice.QuickRefits.fit(raw, groups_of(tiny_tokenizer), [2, 3, 4], None).tensors
    assert (1, 6) in every and (1, 2) not in every and (3, 6) in every
