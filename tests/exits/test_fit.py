"""The fit of exits: against a solve with all texts, sources, bases, teachers, ranks, and what is refused."""

import random
from hashlib import blake2b

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel

from m3bert.encode.states import check_pooling
from m3bert.evaluation import GridEncoder
from m3bert.exits.plan import FitOptions, FitPlan
from m3bert.exits.raw_states import RawStates
from m3bert.modeling import M3BertModel
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.trainers import (
    Contrastive,
    Grid,
    NestedTrainer,
    NestedTrainingArguments,
    Projection,
    TeacherEmbeddings,
    fit_exits,
    nested_states,
    truncate,
)
from tests.conftest import WORDS, assert_close, quiet, refused, tiny_config
from tests.trainers.tiny_run import run_two


def random_texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, 20))) for _ in range(count)]


@pytest.fixture
def model() -> M3BertModel:
    torch.manual_seed(5)
    return M3BertModel(tiny_config(matryoshka_layers=[], matryoshka_dims=[])).eval()


@torch.no_grad()
def pooled(model, tokenizer, texts, layers, pooling="mean") -> dict[int, torch.Tensor]:
    states = nested_states(model, tokenizer(texts, padding=True, return_tensors="pt"), layers)
    return {layer: states.pooled(layer, pooling).double() for layer in layers}


def naive_ridge(inputs, targets, penalty):
    """Ridge regression with every text in memory; returns the function of other inputs."""
    mean, scale, target_mean = inputs.mean(dim=0), inputs.std(dim=0, correction=0), targets.mean(dim=0)
    scale = scale.where(scale > 1e-9, torch.inf)
    x = (inputs - mean) / scale
    weight = torch.linalg.solve(
        x.T @ x / len(x) + penalty * torch.eye(x.shape[1]), x.T @ (targets - target_mean) / len(x)
    )
    return lambda others: (others - mean) / scale @ weight + target_mean


@pytest.fixture
def unmatched(monkeypatch) -> None:
    """Variances are not matched, so that a fit is a plain ridge regression."""
    monkeypatch.setattr("m3bert.exits.ridge.Regression.match_variances", lambda _, affine, *axes: affine)


@pytest.mark.usefixtures("unmatched")
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_an_exit_is_the_ridge_regression_to_the_normalised_embedding_of_the_last_layer(model, tiny_tokenizer, pooling):
    texts = random_texts(300)
    raw = pooled(model, tiny_tokenizer, texts, [1, 2, 4, 6], pooling)
    fit = fit_exits(model, tiny_tokenizer, texts, layers=[1, 2, 4], pooling=pooling, static=False)
    assert list(fit.layers) == Elasticity.of(model.config).exits == [1, 2, 4]
    target = truncate(raw[6], 32, normalize=True)
    for layer, vectors in pooled(model, tiny_tokenizer, texts, [1, 2, 4], pooling).items():
        expected = naive_ridge(raw[layer], target, fit.layers[layer].penalty)(raw[layer])
        torch.testing.assert_close(vectors, expected, atol=1e-4, rtol=1e-4)
    # The last layer is what it was, so an index of the original encoder stays valid.
    assert torch.equal(pooled(model, tiny_tokenizer, texts, [6], pooling)[6], raw[6])


def test_batches_and_order_of_reading_do_not_matter(model, tiny_tokenizer, monkeypatch):
    texts, exits = random_texts(300), []
    for batch_size, at_once in ((64, 1024), (7, 50)):
        monkeypatch.setattr("m3bert.exits.tokenized_texts.TEXTS_AT_ONCE", at_once)
        fit_exits(model, tiny_tokenizer, iter(texts), batch_size=batch_size)
        exits.append({name: tensor.clone() for name, tensor in model.elastic.exits.state_dict().items()})
    for name, tensor in exits[0].items():
        torch.testing.assert_close(exits[1][name], tensor, atol=1e-4, rtol=1e-4)


def test_a_principal_basis_changes_no_cosine_at_full_width_and_orders_the_dims(model, tiny_tokenizer):
    texts = random_texts(300)
    fit_exits(model, tiny_tokenizer, texts, layers=[2])
    plain = pooled(model, tiny_tokenizer, texts, [0, 2, 6])
    fit_exits(model, tiny_tokenizer, texts, layers=[2], basis="principal")
    assert Elasticity.of(model.config).exits == [0, 2, 6]
    rotated = pooled(model, tiny_tokenizer, texts, [0, 2, 6])
    for layer in (0, 2, 6):
        one, other = (truncate(vectors[layer], 32, normalize=True) for vectors in (plain, rotated))
        torch.testing.assert_close(one @ one.T, other @ other.T, atol=1e-4, rtol=1e-4)
    variances = truncate(rotated[6], 32, normalize=True).var(dim=0)
    assert (variances.diff() <= 1e-6).all()


def test_an_exit_varies_as_the_last_layer_along_each_principal_axis(model, tiny_tokenizer):
    texts = random_texts(300)
    raw = pooled(model, tiny_tokenizer, texts, [2])[2]
    fit_exits(model, tiny_tokenizer, texts, layers=[2], basis="principal")
    vectors = pooled(model, tiny_tokenizer, texts, [0, 2, 6])
    target = truncate(vectors[6], 32, normalize=True).var(dim=0)[:20]
    torch.testing.assert_close(vectors[0].var(dim=0)[:20], target, atol=0, rtol=1e-2)
    alone = model.elastic.exits["2"](raw.float()).var(dim=0)[:20]
    torch.testing.assert_close(alone.double(), target, atol=0, rtol=1e-2)


def test_the_quality_is_measured_on_held_out_texts(model, tiny_tokenizer, monkeypatch):
    fit = fit_exits(model, tiny_tokenizer, random_texts(600), static=False)
    r_squared = [layer.r_squared for layer in fit.layers.values()]
    assert r_squared == sorted(r_squared), "deeper layers are nearer to the last one"
    assert all(0 < layer.r_squared < layer.cosine < 1 for layer in fit.layers.values())
    # Noise cannot be predicted on texts that were held out, however well it is fitted.
    texts = list(dict.fromkeys(random_texts(600)))
    noise = torch.randn(len(texts), 32, generator=torch.Generator().manual_seed(1)).numpy()
    monkeypatch.setattr("m3bert.exits.sums.PENALTIES", (1e-6,))
    overfitted = fit_exits(model, tiny_tokenizer, texts, teacher=TeacherEmbeddings(texts, noise))
    assert max(layer.r_squared for layer in overfitted.layers.values()) < 0


def test_the_fit_is_on_record_and_survives_saving(model, tiny_tokenizer, tmp_path):
    fit = fit_exits(model, tiny_tokenizer, ["", "  ", *random_texts(100)], layers=[2, 4])
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    record = Elasticity.of(loaded.config).fit
    assert record == fit.record()
    assert (record["texts"], record["pooling"], record["target"], record["dim"]) == (100, "mean", "last layer", 32)
    assert (
        record["layers"]["2"].keys() == {"penalty", "r_squared", "cosine", "agreement"}
        and len(record["fingerprint"]) == 32
    )
    assert loaded.config.matryoshka_layers == [0, 2, 4, 6]
    other = fit_exits(model, tiny_tokenizer, random_texts(100, seed=1), layers=[2, 4])
    assert other.fingerprint != fit.fingerprint


def test_a_projection_becomes_the_exit_of_the_last_layer(model, tiny_tokenizer):
    texts, projection = random_texts(300), Projection(32, 6)
    raw = pooled(model, tiny_tokenizer, texts, [6])[6]
    fit = fit_exits(model, tiny_tokenizer, texts, layers=[2], projection=projection)
    assert fit.dim == 6 and model.config.output_dim == 6 and Elasticity.of(model.config).exits == [0, 2, 6]
    vectors = pooled(model, tiny_tokenizer, texts, [2, 6])
    torch.testing.assert_close(vectors[6][:, :6], projection(raw.float()).double(), atol=1e-5, rtol=1e-5)
    assert not vectors[6][:, 6:].any() and not vectors[2][:, 6:].any()
    fit_exits(model, tiny_tokenizer, texts, layers=[2])
    assert model.config.output_dim is None, "a fit without a projection has all dims"


@pytest.mark.parametrize("basis", ["last_layer", "principal"])
@pytest.mark.parametrize("width", [20, 32, 48])
def test_a_fitted_model_searches_an_index_of_any_width(model, tiny_tokenizer, width, basis):
    """As close to the index as a ridge regression to its dims; of a wider one, to its first principal axes."""
    texts = random_texts(400)
    raw = pooled(model, tiny_tokenizer, texts, [6])[6]
    index = truncate((raw @ torch.randn(32, width, dtype=torch.float64)).tanh(), width, normalize=True)
    teacher = TeacherEmbeddings(texts[::-1], index.flip(0).float().numpy())  # looked up by text, in any order
    fit = fit_exits(model, tiny_tokenizer, texts, teacher=teacher, teacher_name="large", basis=basis)
    assert [*fit.layers] == [*range(7)] and fit.target == "large" and fit.dim == min(width, 32)
    vectors = pooled(model, tiny_tokenizer, texts, [6])[6][:, : fit.dim]
    if fit.to_target is None:
        assert basis == "last_layer" and width <= 32
    else:
        assert fit.to_target.shape == (fit.dim, width)
        torch.testing.assert_close(fit.to_target @ fit.to_target.T, torch.eye(fit.dim), atol=1e-5, rtol=0)
        vectors = vectors @ fit.to_target.double()
    assert vectors.shape == index.shape
    best = naive_ridge(raw, index, 1e-4)(raw)
    close, closest = (torch.cosine_similarity(side, index).mean() for side in (vectors, best))
    assert close > 0.97 * closest
    similarities = truncate(vectors, width, normalize=True) @ index.T
    assert (similarities.argmax(dim=1) == torch.arange(len(texts))).double().mean() > 0.8


def test_embeddings_that_are_no_targets_are_refused_before_the_vocabulary_is_encoded(
    model, tiny_tokenizer, monkeypatch
):
    texts = random_texts(60)
    vectors = torch.randn(60, 20, generator=torch.Generator().manual_seed(1)).numpy()
    monkeypatch.setattr(RawStates, "pooled", lambda *_: pytest.fail("a text was encoded"))
    for wrong in (float("nan"), float("inf"), 0.0):
        spoilt = vectors.copy()
        spoilt[7] = wrong
        with pytest.raises(ValueError, match=f"The teacher's embedding is zero or not finite: '{texts[7][:9]}"):
            fit_exits(model, tiny_tokenizer, texts, teacher=TeacherEmbeddings(texts, spoilt))
    with pytest.raises(ValueError, match="The teacher has no embedding of 'a file': embed all texts first"):
        fit_exits(model, tiny_tokenizer, [*texts, "a file"], teacher=TeacherEmbeddings(texts, vectors))


FIT_OF_TWO = """
import torch
from tests.conftest import tiny_tokenizer, tiny_config
from tests.exits.test_fit import random_texts
from m3bert.modeling import M3BertModel
from m3bert.trainers import fit_exits
torch.distributed.init_process_group("gloo")
torch.manual_seed(5)
model = M3BertModel(tiny_config())
sources = {"a": iter(random_texts(201)), "b": random_texts(1, seed=3)}
fit = fit_exits(model, tiny_tokenizer.__wrapped__(), sources)
if torch.distributed.get_rank() == 0:
    torch.save({"exits": model.elastic.exits.state_dict(), "record": fit.record()}, Path(sys.argv[1]) / "fit.pt")
"""


def test_two_processes_fit_what_one_does(tiny_tokenizer, tmp_path):
    run_two(tmp_path, FIT_OF_TWO)
    of_two = torch.load(tmp_path / "fit.pt")
    torch.manual_seed(5)
    model = M3BertModel(tiny_config())
    fit = fit_exits(model, tiny_tokenizer, {"a": random_texts(201), "b": random_texts(1, seed=3)})
    for name, tensor in model.elastic.exits.state_dict().items():
        torch.testing.assert_close(of_two["exits"][name], tensor, atol=1e-4, rtol=1e-4)
    expected = fit.record()
    for layer, values in expected["layers"].items():
        assert of_two["record"]["layers"][layer] == pytest.approx(values, rel=1e-2)
    assert of_two["record"] | {"layers": None} == expected | {"layers": None}


def test_too_few_texts_are_refused_with_the_number_wanted(model, tiny_tokenizer):
    with pytest.raises(ValueError, match="31 texts are too few to fit exits of 32 dims: 32 texts are the minimum"):
        fit_exits(model, tiny_tokenizer, [*random_texts(31), "", " "])
    assert Elasticity.of(model.config).exits == [] and Elasticity.of(model.config).fit is None


def test_states_that_are_not_finite_are_refused_with_their_layer(model, tiny_tokenizer):
    fit_exits(model, tiny_tokenizer, random_texts(100), layers=[2])
    before = model.elastic.exits["2"].weight.clone()
    with torch.no_grad():
        model.layers[3].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="Hidden states of layer 4 are not finite, for example of '"):
        fit_exits(model, tiny_tokenizer, random_texts(100), static=False)
    assert torch.equal(model.elastic.exits["2"].weight, before) and Elasticity.of(model.config).table == [0, 2], (
        "the model is as it was"
    )
    assert model.config.matryoshka_layers == [0, 2, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"basis": "pca"}, "basis='pca' is unknown; legal values: last_layer, principal"),
        ({"pooling": "max"}, "pooling='max' is unknown; legal values: mean, cls, lasttoken"),
        ({"depths": [2, 6]}, r"depths=\[6\] must be within 0..5: the model has 6 layers"),
        ({"paths": {2: [1, 5]}}, "a path must end in the last layer, 6"),
        ({"max_length": 0}, "max_length=0 must be at least 1"),
    ],
)
def test_a_plan_refuses_what_is_not_legal(model, tiny_tokenizer, changes, message):
    refused(message, FitPlan.of, model, tiny_tokenizer, FitOptions(**changes))


@pytest.mark.parametrize(
    ("changes", "layers", "paths", "chosen"),
    [
        ({}, [0, 1, 2, 3, 4, 5], {}, []),
        ({"static": False, "layers": [2, 6]}, [2], {}, []),
        ({"depths": [1, 3]}, [0, 1], {}, [3]),
        ({"paths": {3: [1, 2, 3], 2: [1, 6]}, "depths": [2, 4]}, [0, 3], {2: [1, 6]}, [4]),
    ],
)
def test_a_plan_sorts_depths_into_prefixes_paths_and_choices(model, tiny_tokenizer, changes, layers, paths, chosen):
    plan = FitPlan.of(model, tiny_tokenizer, FitOptions(**changes))
    assert (plan.prefixes, plan.paths, plan.chosen) == (layers, paths, chosen)


@pytest.mark.usefixtures("unmatched")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dims", [24, 40])  # of 32 of the hidden state
def test_exits_map_into_the_space_before_a_projection_that_stays(tiny_tokenizer, dims, bias, static):
    torch.manual_seed(0)
    bert = BertModel(
        BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24)
    ).eval()
    texts, projection = random_texts(300), Projection(32, dims, bias=bias)
    raw = pooled(bert, tiny_tokenizer, texts, [1, 3])
    fit = fit_exits(bert, tiny_tokenizer, texts, layers=[1], projection=projection, static=static)
    target = truncate(projection(raw[3].float()), dims, normalize=True).double()
    projected = {
        layer: projection(vectors.float()).double()
        for layer, vectors in pooled(bert, tiny_tokenizer, texts, fit.layers).items()
    }
    assert Elasticity.of(bert.config).exits == [*fit.layers] and bert.config.elastic["reads_all_dims"]
    if not static:
        expected = naive_ridge(raw[1], target, fit.layers[1].penalty)(raw[1])
        # The nearest that the projection reaches.
        weight, offset = projection.weight.detach().double(), projection(torch.zeros(32)).detach().double()
        expected = offset + (expected - offset) @ (weight @ torch.linalg.pinv(weight)).T
        torch.testing.assert_close(projected[1], expected, atol=1e-4, rtol=1e-4)
    # Better than the state alone, which knows nothing of the table. A projection with a bias and more dims than the
    # hidden state does not reach normalised targets.
    for layer, vectors in projected.items() if dims == 24 or not bias else ():
        error = (vectors - target).square().sum() / (target - target.mean(dim=0)).square().sum()
        assert error < 1 - fit.layers[layer].r_squared + 0.05
    fit_exits(bert, tiny_tokenizer, texts, layers=[1], static=False)
    assert "reads_all_dims" not in bert.config.elastic


def test_another_pooling_than_was_fitted_is_refused_and_both_are_named(model, tiny_tokenizer, tmp_path):
    fit_exits(model, tiny_tokenizer, random_texts(100), pooling="mean")
    message = "The exits were fitted with pooling='mean', not 'cls'"
    refused(message, GridEncoder, model, tiny_tokenizer, Grid.parse("2x8"), pooling="cls")
    with pytest.raises(ValueError, match=message):
        args = NestedTrainingArguments(**quiet(tmp_path))
        NestedTrainer(model, Contrastive(Grid.parse("2x8"), pooling="cls"), args, lambda x: x)
    check_pooling("mean", model.config)


def test_training_drops_the_exits_of_layers_that_it_does_not_train(model, tiny_tokenizer, tmp_path, caplog):
    fit_exits(model, tiny_tokenizer, random_texts(100))
    args = NestedTrainingArguments(**quiet(tmp_path))
    NestedTrainer(model, Contrastive(Grid.parse("2,4,6x8")), args, lambda x: x)
    assert Elasticity.of(model.config).exits == [2, 4] and list(model.elastic.exits) == ["2", "4"]
    assert "depths 0, 1, 3, 5 are dropped" in caplog.text


def features_of(model, tokenizer, texts):
    """The features of texts, token by token: every token as a text of its own, and its share in the texts."""
    special = set(tokenizer.all_special_ids)
    ids = [[token for token in row if token not in special] for row in tokenizer(texts)["input_ids"]]
    counts = torch.bincount(torch.tensor(sum(ids, [])), minlength=99).double()
    features = {}
    for token in sorted({token for row in ids for token in row}):
        framed = torch.tensor([[0, token, 2]])
        states = nested_states(model, {"input_ids": framed, "attention_mask": torch.ones_like(framed)}, [6])
        alone, share = states.pooled(6, "mean")[0].detach().double(), counts[token] / counts.sum()
        vectors = (alone, model.embed_tokens.weight[token].detach().double())
        weights = (1, *(a / (a + share) for a in (1e-3, 1e-4)))
        features[token] = torch.cat([weight * vector for vector in vectors for weight in weights])
    return torch.stack([torch.stack([features[token] for token in row]).mean(dim=0) for row in ids])


@pytest.mark.usefixtures("unmatched")
def test_a_static_table_and_the_exits_that_read_it_are_ridge_regressions(model, tiny_tokenizer):
    texts = random_texts(300)
    raw = pooled(model, tiny_tokenizer, texts, [2, 6])
    features, target = features_of(model, tiny_tokenizer, texts), truncate(raw[6], 32, normalize=True)
    fit = fit_exits(model, tiny_tokenizer, texts, layers=[2])
    assert Elasticity.of(model.config).exits == Elasticity.of(model.config).table == [0, 2]
    table = naive_ridge(features, target, fit.layers[0].penalty)
    vectors = pooled(model, tiny_tokenizer, texts, [0, 2])
    torch.testing.assert_close(vectors[0], table(features), atol=1e-3, rtol=1e-3)
    # The exit of layer 2 is fitted with tables that have not seen the text; fold 2 is held out.
    digests = [blake2b(text.encode(), digest_size=5).digest() for text in texts]
    fold = torch.tensor([2 if int.from_bytes(x[:4], "big") < 2**32 / 10 else x[4] % 2 for x in digests])
    static = torch.empty(300, 32, dtype=torch.float64)
    for number in (0, 1):
        fitted = naive_ridge(features[fold == number], target[fold == number], fit.layers[0].penalty)
        static[fold == 1 - number] = fitted(features[fold == 1 - number])
    static[fold == 2] = naive_ridge(features[fold < 2], target[fold < 2], fit.layers[0].penalty)(features[fold == 2])
    joint = naive_ridge(torch.cat([raw[2], static], dim=1), target, fit.layers[2].penalty)
    expected = joint(torch.cat([raw[2], vectors[0]], dim=1))
    torch.testing.assert_close(vectors[2], expected, atol=1e-3, rtol=1e-3)
    # Beside it, the map that reads the state alone.
    alone = naive_ridge(raw[2], target, fit.state_only[2].penalty)
    torch.testing.assert_close(model.elastic.exits["2"](raw[2].float()).double(), alone(raw[2]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("prompt", "counts"), [("for the ", False), ("for the " * 5, True)], ids=["short", "long"])
def test_a_static_state_leaves_out_special_tokens_and_a_short_prompt(model, tiny_tokenizer, prompt, counts):
    fit = fit_exits(model, tiny_tokenizer, random_texts(100), prompts=[prompt], layers=[2])
    prompted_ids = tiny_tokenizer("for the", add_special_tokens=False)["input_ids"]
    assert fit.prompts == [prompt]
    assert {*Elasticity.of(model.config).ignored_ids} == {0, 1, 2, 3, 4, *(() if counts else prompted_ids)}
    assert not model.elastic.table.weight[:5].any() and model.elastic.table.weight[5:33].any()
    with_prompt, plain = (pooled(model, tiny_tokenizer, [text], [0])[0] for text in ("for the list", "list"))
    assert torch.allclose(with_prompt, plain, rtol=1e-5, atol=1e-6) is not counts
    rows = [pooled(model, tiny_tokenizer, [word], [0])[0] for word in ("for", "the", "list")]
    assert_close(with_prompt, sum(rows) / (3 if counts else 1))
    assert not pooled(model, tiny_tokenizer, [""], [0])[0].any()


def test_the_embeddings_of_the_vocabulary_are_kept(model, tiny_tokenizer, tmp_path, monkeypatch):
    encoded, encode = [], RawStates.pooled

    def counted(raw, ids, layers, **options):
        encoded.append(len(ids))
        return encode(raw, ids, layers, **options)

    monkeypatch.setattr(RawStates, "pooled", counted)
    for _ in range(2):
        fit_exits(model, tiny_tokenizer, random_texts(100), cache_dir=tmp_path)
    assert encoded.count(28) == encoded.count(100) == 1, "the vocabulary and the texts once"


@pytest.mark.parametrize("tokens", [20, 300])
def test_a_tokenizer_of_another_model_is_refused(tiny_tokenizer, tokens):
    model = M3BertModel(tiny_config(vocab_size=tokens))
    with pytest.raises(ValueError, match=f"tokens, and the model {tokens}: it is not the tokenizer of this model"):
        fit_exits(model, tiny_tokenizer, random_texts(100))
    assert Elasticity.of(model.config).exits == []
