"""The card of a run: what it says is what was recorded and measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import BertConfig, BertModel

from hub_cards.card import CardSource, render_card
from hub_cards.checkpoint import Checkpoint
from hub_cards.metadata import Statements
from hub_cards.publication import Options, describe, prepare
from hub_cards.sections import parse
from modeling_m3bert import M3BertForMaskedLM, M3BertForSequenceClassification, M3BertModel
from tests.conftest import quiet, tiny_config
from tests.published import GRID, TASKS, contrastive_trainer, save_with_exits
from trainers import (
    ContrastiveConfig,
    EspressoConfig,
    Grid,
    IBKDConfig,
    IBKDFinetuningConfig,
    Matryoshka2dConfig,
    MatryoshkaDistillationConfig,
    MICConfig,
    MIPICConfig,
    MultigranularMLMConfig,
    Objective,
    SimCSEConfig,
    StarbucksConfig,
)
from trainers.core.objective import Identity
from trainers.core.papers import CRD, ESE, HPD, IBKD, M3BERT, MIC, MIPIC, MRL, SIMCSE, STARBUCKS, Paper
from trainers.evaluation import GridResults, find_task
from trainers.hub.training_record import TrainingRecord, parts_of


SAID = Statements("apache-2.0", ("en",), ("user/pairs",), "user/base", ("documentation",))


@pytest.fixture(scope="module")
def published(run, tmp_path_factory) -> Path:
    """The run, laid out."""
    return lay_out(run, tmp_path_factory.mktemp("cards") / "published")


def lay_out(run: Path, folder: Path, previous: str | None = None, **options) -> Path:
    folder.mkdir()
    results = GridResults.load(run / "results.json")
    prepare(Checkpoint(run / "output"), folder, "user/model", Options(statements=SAID, **options), results, previous)
    return folder


def section(text: str, name: str) -> str:
    """The text of one section of a card."""
    return next(part.text for part in parse(text) if part.name == name)


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of the table with this header."""
    _, _, below = text.partition(f"{header}\n")
    lines = below.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


# --- What was trained -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """
    A training loss, and what its card names.

    Args:
        config (`type`): Class of the configuration.
        options (`dict`): Its arguments.
        parts (`dict[str, tuple[float, list[Paper]]]`): Name of each part -> weight and papers.
    """

    config: type
    options: dict
    parts: dict[str, tuple[float, list[Paper]]]


MLM_GRID = "2,4,6x8,16,32"
CASES = {
    "mipic": Case(MIPICConfig, {}, {"MRL": (0.4, [MRL]), "SIA": (0.6, [MIPIC]), "PIC": (0.6, [MIPIC])}),
    "mipic-with-sir-without-pic": Case(
        MIPICConfig,
        {"weights": {"sir": 0.1, "pic": 0}},
        {"MRL": (0.4, [MRL]), "SIA": (0.6, [MIPIC]), "SIR": (0.1, [MIC])},
    ),
    "mic": Case(MICConfig, {}, {"MRL": (1, [MRL]), "SCR": (0.6, [MIC]), "SIR": (0.6, [MIC])}),
    "mic-with-pic": Case(
        MICConfig,
        {"weights": {"pic": 0.25}, "gamma": 0.3},
        {"MRL": (1, [MRL]), "PIC": (0.25, [MIPIC]), "SCR": (0.3, [MIC]), "SIR": (0.3, [MIC])},
    ),
    "mic-of-one-part": Case(MICConfig, {"weights": {"mrl": 0, "sir": 0}}, {"SCR": (0.6, [MIC])}),
    "ibkd": Case(IBKDConfig, {"beta": 2}, {"InfoNCE with a teacher": (1, [IBKD]), "HSIC": (2, [IBKD])}),
    "ckd": Case(IBKDConfig, {"method": "ckd"}, {"InfoNCE with a teacher": (1, [IBKD])}),
    "mse": Case(IBKDConfig, {"method": "mse"}, {"MSE to a teacher": (1, [])}),
    "crd": Case(IBKDConfig, {"method": "crd"}, {"CRD": (1, [CRD])}),
    "hpd": Case(IBKDConfig, {"method": "hpd", "projection_dim": 8}, {"HPD": (1, [HPD])}),
    "ibkd-finetuning": Case(IBKDFinetuningConfig, {}, {"InfoNCE": (1, []), "HSIC": (0.5, [IBKD])}),
    "one-granularity": Case(ContrastiveConfig, {"grid": "6x32"}, {"InfoNCE": (1, [])}),
    "one-layer": Case(ContrastiveConfig, {"grid": "6x8,32"}, {"MRL": (1, [MRL])}),
    "several-layers": Case(ContrastiveConfig, {"grid": GRID}, {"MRL": (1, [MRL, M3BERT])}),
    "simcse": Case(SimCSEConfig, {}, {"SimCSE": (1, [SIMCSE])}),
    "ese": Case(EspressoConfig, {"grid": GRID}, {"ESE": (1, [ESE])}),
    "2dmse": Case(Matryoshka2dConfig, {"grid": GRID}, {"2DMSE": (1, [ESE])}),
    "starbucks": Case(StarbucksConfig, {"grid": "2x8,4x16,6x32"}, {"Starbucks": (1, [STARBUCKS])}),
    "mlm": Case(MultigranularMLMConfig, {"grid": MLM_GRID}, {"Multigranular MLM": (1, [M3BERT])}),
    "distillation": Case(
        MatryoshkaDistillationConfig,
        {"grid": MLM_GRID, "pairs": "6x32>all"},
        {"Matryoshka distillation": (1, [M3BERT])},
    ),
}


class OwnLoss(Objective):
    """A user's own objective, of which nothing is on record but its class."""


@pytest.fixture(scope="module", params=["m3bert", "bert"])
def checkpoint(request, tmp_path_factory, tiny_tokenizer) -> Path:
    """Folder of a tiny encoder of six layers and width 32, whose training record a test writes."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = M3BertModel(tiny_config()) if request.param == "m3bert" else BertModel(BertConfig(vocab_size=99, **sizes))
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def card_of(folder: Path, identity: Identity, grid: Grid) -> ModelCard:
    """The card of a checkpoint that was trained with this objective."""
    TrainingRecord(
        trainer="SomeTrainer",
        objective=identity.name,
        parts=parts_of(identity),
        tags=list(identity.tags),
        grid=str(grid),
        base_model=None,
        earlier=[],
        settings={"learning_rate": 0.1, "note": "a|b"},
        columns=["text"],
        rows=8,
        datasets=[],
        steps=1,
        batch_size=8,
        seed=0,
    ).save(folder)
    return render_card(CardSource("user/model", Checkpoint(folder)))


def cited(text: str) -> list[str]:
    """Titles of the BibTeX entries of a card."""
    return re.findall(r"^  title = \{\{(.+)\}\},$", section(text, "citation"), re.MULTILINE)


def linked(text: str) -> set[str]:
    """Identifiers of the papers that a card links to."""
    return set(re.findall(r"https://huggingface\.co/papers/([\d.]+)", text))


@pytest.mark.parametrize("name", CASES)
def test_the_card_names_exactly_the_parts_and_cites_exactly_their_papers(checkpoint, tmp_path, name):
    case = CASES[name]
    config = case.config(**quiet(tmp_path, **case.options))
    grid = config.grid_for(tiny_config())
    # All that an objective needs of a teacher is a width and principal components.
    teacher = SimpleNamespace(width=24, principal_components=lambda dim: torch.eye(24)[:dim])
    if case.config is IBKDConfig:
        objective = config.build_distillation(grid, teacher)
    else:
        objective = config.build_objective(grid)
    identity = objective.identity
    card = card_of(checkpoint, identity, grid)
    training, several = section(card.text, "training"), len(case.parts) > 1

    assert f"- Objective: {' + '.join(case.parts)}" in training
    assert ("weighted sum" in training) == several
    found = rows(training, f"| loss |{' weight |' if several else ''} what it computes | papers |")
    assert [row[0] for row in found] == list(case.parts)
    for row, (weight, papers), part in zip(found, case.parts.values(), identity.parts or [identity], strict=True):
        assert row[1:-1] == [*([f"{weight:g}"] if several else []), part.equation] and part.equation
        links = [f"[{paper.title}](https://huggingface.co/papers/{paper.id})" for paper in papers]
        assert row[-1] == (", ".join(links) or "none")

    papers = list(dict.fromkeys(paper for _, members in case.parts.values() for paper in members))
    assert linked(card.text) == {paper.id for paper in papers}
    architecture = [M3BERT] if Checkpoint(checkpoint).elastic else []
    assert cited(card.text) == [paper.title for paper in dict.fromkeys([*architecture, *papers])]
    assert set(identity.tags) - {"matryoshka"} <= set(card.data.tags)


def test_exits_that_were_trained_are_told_apart_from_exits_that_were_fitted(tmp_path, tiny_tokenizer, sentences):
    save_with_exits(tmp_path, tiny_tokenizer, sentences)
    fitted = render_card(CardSource("user/model", Checkpoint(tmp_path))).text
    trained = card_of(tmp_path, OwnLoss(Grid.parse("2,6x8,32")).identity, Grid.parse("2,6x8,32")).text
    assert "maps that were fitted without training" in section(fitted, "summary")
    assert "It was trained at these granularities (layers x dims): `2,6x8,32`" in section(trained, "summary")
    assert "before the training" in section(trained, "exits") and "before the training" not in section(fitted, "exits")
    assert "were fitted without training" not in section(trained, "limits")
    assert "| 0x8 |" in section(trained, "costs"), "an exit can be read, trained or not"


def test_the_card_says_which_layers_a_path_runs(tmp_path, tiny_tokenizer, sentences):
    save_with_exits(tmp_path, tiny_tokenizer, sentences, paths={4: [1, 2, 5, 6]})
    text = section(render_card(CardSource("user/model", Checkpoint(tmp_path))).text, "exits")
    assert "Depth 4 is a path: it runs the layers 1, 2, 5 and 6." in text
    assert "The exits of depths 1, 2 and 4 read the static table" in text


def test_an_objective_of_ones_own_needs_no_papers(checkpoint):
    grid = Grid.parse("6x32")
    text = card_of(checkpoint, OwnLoss(grid).identity, grid).text
    assert rows(section(text, "training"), "| loss | what it computes | papers |") == [
        ["OwnLoss", "not on record", "none"]
    ]
    elastic = Checkpoint(checkpoint).elastic
    assert linked(text) == set() and cited(text) == ([M3BERT.title] if elastic else [])
    assert ("No papers are on record." in text) == (not elastic)


def test_a_user_may_cite_a_paper_of_their_own(checkpoint):
    paper = Paper("A loss", "2601.00001", ("Somebody Else",))
    identity = Identity("Own", "KL(p || q)", (paper,), ("mine",))
    card = card_of(checkpoint, identity, Grid.parse("6x32"))
    (row,) = rows(section(card.text, "training"), "| loss | what it computes | papers |")
    assert row == ["Own", "KL(p || q)", "[A loss](https://huggingface.co/papers/2601.00001)"]
    assert "A loss" in cited(card.text) and "@misc{else2026," in card.text and "mine" in card.data.tags


def test_settings_are_listed_and_empty_ones_are_not(checkpoint):
    grid = Grid.parse("6x32")
    training = section(card_of(checkpoint, OwnLoss(grid).identity, grid).text, "training")
    assert rows(training, "| setting | value |") == [["`learning_rate`", "`0.1`"], ["`note`", "`a|b`"]]


# --- The whole card of a run ------------------------------------------------------------------------------------


def test_the_metadata_is_read_by_the_hubs_own_loader_with_every_granularity(published, run):
    data = ModelCard.load(published / "README.md").data
    assert (data.license, data.language, data.base_model) == ("apache-2.0", ["en"], "user/base")
    assert (data.library_name, data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    assert data.datasets == ["user/pairs"] and {"m3bert", "matryoshka", "documentation"} <= set(data.tags)
    scores = json.loads((run / "results.json").read_text())["scores"]
    expected = {(s["task"], s["granularity"], s["metric"]): s["value"] for s in scores if s["main"]}
    found = {
        (e.dataset_name, "{layer}x{dim}".format(**e.metric_args), e.metric_type): e.metric_value
        for e in data.eval_results
    }
    assert found.keys() == expected.keys() and len(found) == len(TASKS) * len(Grid.parse(GRID))
    assert all(found[key] == pytest.approx(expected[key], abs=1e-6) for key in expected)
    assert {e.dataset_type for e in data.eval_results if e.dataset_name == "stsb"} == {"mteb/stsbenchmark-sts"}


def test_every_link_and_figure_is_in_the_folder(published):
    text = ModelCard.load(published / "README.md").text
    targets = re.findall(r"\]\(([^)]+)\)", text)
    inside = [target for target in targets if not target.startswith("https://huggingface.co/")]
    assert {"results.json"} < set(inside) and sum(target.startswith("figures/") for target in inside) >= 4
    assert all((published / target).is_file() for target in inside)


def test_the_card_says_what_the_run_was(published):
    text = ModelCard.load(published / "README.md").text
    for said in (
        "`ContrastiveTrainer`, 2 steps of 8 rows",
        "24 rows with the columns `anchor`, `positive` of the data set [user/pairs](https://hugg",
        "huggingface.co/papers/2605.19568",
        "Eqs. 1 and 4",
        "| `learning_rate` | `0.0003` |",
        "| `max_steps` | `2` |",
        "| `max_length` | `40` |",
        "[user/base](https://huggingface.co/user/base)",
        "pair classification, bitext mining",
        "`4x16` means: depth 4, keep the first 16 numbers.",
        "@misc{",
    ):
        assert said in text, said
    assert "weight_decay" not in text  # a default
    assert "output_dir" not in text and str(published) not in text


def test_the_card_says_what_every_task_is_and_how_many_texts_it_has(published, run):
    evaluation = section((published / "README.md").read_text(), "evaluation")
    table = {row[0]: row[1:] for row in rows(evaluation, "| task | type | score | texts | what it is |")}
    counted = GridResults.load(run / "results.json").texts
    assert set(table) == {f"`{task}`" for task in TASKS} and set(counted) == set(TASKS)
    assert table["`stsb`"][2] == f"{counted['stsb']['sentence1']} pairs"
    assert table["`cranfield`"][2] == "{queries} queries, {documents} documents".format(**counted["cranfield"])
    assert [row[3] for row in table.values()] == [find_task(task).about for task in TASKS] and all(
        map(all, table.values())
    )


def test_a_card_names_own_data_and_a_task_that_is_not_known(run):
    results = GridResults.load(run / "results.json")
    results.settings["own_data"] = {"stsb": "mine.csv"}
    results = replace(results, scores=[replace(s, task=s.task.replace("cranfield", "theirs")) for s in results.scores])
    text = section(str(render_card(CardSource("user/model", Checkpoint(run / "output"), results))), "evaluation")
    table = {row[0]: row[1:] for row in rows(text, "| task | type | score | texts | what it is |")}
    assert table["`stsb`"][3] == "own data: `mine.csv`" and table["`theirs`"][2:] == ["", ""]


def test_a_card_says_that_a_task_is_of_the_data_that_was_trained_on(run):
    results, said = GridResults.load(run / "results.json"), Statements(datasets=("mteb/banking77",))
    text = section(str(render_card(CardSource("user/model", Checkpoint(run / "output"), results, said))), "limits")
    assert "It was trained on `mteb/banking77`, where `banking77` is from" in text
    assert "`stsb` is from" not in text and "how near the training data is" in text


@pytest.mark.parametrize(
    ("rows_read", "datasets", "files", "said"),
    [
        (2055, [], ["pairs.jsonl"], "2,055 rows with the columns `text` of the local file `pairs.jsonl`"),
        (
            None,
            ["user/a"],
            ["b.csv", "c.csv"],
            "a stream of rows with the columns `text` of the data set "
            "[user/a](https://huggingface.co/datasets/user/a), the local file `b.csv`, the local file `c.csv`",
        ),
        (0, [], [], "rows with the columns `text`; their source is not on record"),
    ],
)
def test_the_card_names_the_training_data(checkpoint, rows_read, datasets, files, said):
    grid = Grid.parse("6x32")
    card_of(checkpoint, OwnLoss(grid).identity, grid)
    replace(TrainingRecord.find(checkpoint), rows=rows_read, datasets=datasets, files=files).save(checkpoint)
    training = section(str(render_card(CardSource("user/model", Checkpoint(checkpoint)))), "training")
    assert f"- Data: {said}\n" in training


def test_every_granularity_has_its_costs_and_scores(published):
    text = ModelCard.load(published / "README.md").text
    for g in Grid.parse(GRID):
        assert len(re.findall(rf"^\| {g} \|", text, re.MULTILINE)) >= 2 + len(TASKS)
    assert "ms to encode" in text and "| 8x" not in text


def test_the_card_compares_engines_and_says_which_quantile_a_time_is(run):
    results = GridResults.load(run / "results.json")

    def costs_of(latency):
        source = CardSource("user/model", Checkpoint(run / "output"), replace(results, latency=latency))
        return section(str(render_card(source)), "costs")

    assert "Each is the 10th percentile of its measurements" in costs_of(results.latency)
    assert "other runtimes" not in costs_of(results.latency)
    deepest = results.granularities.full.layer
    text = costs_of(replace(results.latency, quantile=0.5, engine_ms={"ONNX int8": {str(deepest): 0.25}}))
    assert "Each is the median of its measurements" in text
    ((layer, milliseconds, int8),) = rows(text, "| layer | torch | ONNX int8 |")
    assert (layer, int8) == (str(deepest), "0.25")
    assert float(milliseconds) == pytest.approx(results.latency.encode_ms[str(deepest)], abs=0.01)


def test_rendering_again_is_idempotent_and_what_a_person_wrote_stays(published, run, tmp_path):
    card = (published / "README.md").read_text()
    edited = card.replace("## Limits\n", "## Limits\n\n- Do not use it for poetry.\n")
    edited = edited.replace("license: apache-2.0", "license: apache-2.0\nthumbnail: figures/me.png")
    edited += "\n## Thanks\n\nTo all.\n"
    second = (lay_out(run, tmp_path / "second", edited) / "README.md").read_text()
    assert "Do not use it for poetry." in second and "To all." in second and "thumbnail: figures/me.png" in second
    assert (lay_out(run, tmp_path / "third", second) / "README.md").read_text() == second


def describe_into(run: Path, folder: Path, options: Options, previous: str | None) -> ModelCard:
    folder.mkdir()
    prepare(Checkpoint(run / "output"), folder, "user/model", options, None, previous)
    return ModelCard.load(folder / "README.md")


def test_a_persons_statements_stay_unless_there_are_new_ones(run, tmp_path):
    previous = "---\nlicense: mit\nlanguage: de\nbase_model: a/b\ntags:\n- mine\n- onnx\n---\n\n# Old\n"
    data = describe_into(run, tmp_path / "kept", Options(), previous).data
    assert (data.license, data.language, data.base_model) == ("mit", "de", "a/b")
    assert "mine" in data.tags and "onnx" not in data.tags  # no graph is published now
    card = describe_into(run, tmp_path / "said", Options(statements=Statements("apache-2.0")), previous)
    assert card.data.license == "apache-2.0"


def test_without_an_evaluation_the_card_says_so(run, tmp_path):
    card = describe_into(run, tmp_path / "plain", Options(), None)
    assert "This checkpoint was not evaluated." in card.text and "quality, at any granularity" in card.text
    assert "Time was not measured." in card.text and "model-index" not in card.data.to_dict()
    assert not (tmp_path / "plain" / "figures").exists()


def test_results_of_geometry_alone_have_no_table_of_means(run, tmp_path):
    results = GridResults.load(run / "results.json")
    results.scores = [replace(score, task_type="geometry") for score in results.scores if score.task == "stsb"]
    (tmp_path / "geometry").mkdir()
    prepare(Checkpoint(run / "output"), tmp_path / "geometry", "user/model", Options(), results)
    card = (tmp_path / "geometry" / "README.md").read_text()
    assert "None" not in card and "score of each type" not in card and "geometry (spearman)" in card


@pytest.mark.parametrize("text", ["a: [", "- a\n- b"])
def test_a_card_with_broken_metadata_is_refused(run, tmp_path, text):
    with pytest.raises(ValueError):
        describe_into(run, tmp_path / "broken", Options(), f"---\n{text}\n---\n")


# --- Other checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_class, tag, head",
    [
        (M3BertForMaskedLM, "fill-mask", 'pipeline("fill-mask"'),
        (M3BertForSequenceClassification, "text-classification", 'pipeline("text-classification"'),
        (M3BertModel, "feature-extraction", "SentenceTransformer(repo"),
    ],
)
def test_each_head_has_its_usage(tmp_path, tiny_tokenizer, model_class, tag, head):
    folder = tmp_path / "model"
    model_class(tiny_config()).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    describe(Checkpoint(folder), "user/model", Options())
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == tag and head in card.text
    assert card.data.library_name == ("sentence-transformers" if model_class is M3BertModel else "transformers")
    assert "Nothing is known about its training." in card.text


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_the_example_pools_as_the_training_did(tmp_path, tiny_tokenizer, sentences, pooling):
    trainer = contrastive_trainer(tmp_path, tiny_tokenizer, sentences, pooling=pooling)
    trainer.save_model()
    describe(Checkpoint(tmp_path), "user/model", Options())
    card = (tmp_path / "README.md").read_text()
    (example,) = re.findall(r"### transformers\n\n```python\n(.*?)```", card, re.DOTALL)
    space: dict = {}
    exec(example.replace("user/model", str(tmp_path)), space)
    texts = ["open the file", "read a list of names in the text", "to"]
    checkpoint = Checkpoint(tmp_path)
    expected = checkpoint.encoder().encode(texts).at(checkpoint.full, normalize=True)
    torch.testing.assert_close(space["embed"](space["full"], texts), expected, atol=1e-5, rtol=0)


def recorded(folder: Path, tokenizer, sentences, **changes) -> str:
    """The card of a run with these settings."""
    trainer = contrastive_trainer(folder, tokenizer, sentences, **changes)
    trainer.save_model()
    describe(Checkpoint(folder), "user/model", Options())
    return (folder / "README.md").read_text()


def test_what_was_trained_is_what_the_run_trained(tmp_path, tiny_tokenizer, sentences):
    """Not what the lists of the config, which are products and hold the full size, would make of it."""
    card = recorded(tmp_path / "pairs", tiny_tokenizer, sentences, grid="2x8,4x16")
    assert "at these granularities (layers x dims): `2x8,4x16`" in card and "- matryoshka" in card
    full = recorded(tmp_path / "full", tiny_tokenizer, sentences, grid="6x32")
    assert "It was trained at" not in full and "- matryoshka" not in full
    assert "Only the full size was trained" in section(full, "limits")


def test_a_projection_promises_no_granularities(tmp_path, tiny_tokenizer, sentences):
    card = recorded(tmp_path / "run", tiny_tokenizer, sentences, grid=None, projection_dim=16)
    assert "vectors of 16 numbers" in card and "The projection belongs to the last layer" in card
    assert "output_layer" not in card and "It was trained at" not in card and "- matryoshka" not in card


def test_a_card_without_jinja_names_the_extra(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"A model card needs the package jinja2: pip install 'm3bert\[publish\]'"):
        render_card(CardSource("user/model", Checkpoint(checkpoint)))


def test_the_extras_are_not_needed_before_they_are_used():
    """Every module of hub_cards can be imported with the core dependencies alone."""
    extras = ("matplotlib", "jinja2", "onnx", "onnxruntime", "onnxscript", "faiss", "sklearn", "scipy", "torchao")
    names = [file.stem for file in Path(sys.modules["hub_cards"].__file__).parent.glob("[a-z]*.py")]
    code = f"""
        import importlib
        from importlib.machinery import PathFinder
        find = PathFinder.find_spec
        def find_spec(name, path=None, target=None):
            return None if name.split(".")[0] in {extras} else find(name, path, target)
        PathFinder.find_spec = staticmethod(find_spec)
        for name in {names}:
            importlib.import_module("hub_cards." + name)
    """
    done = subprocess.run([sys.executable, "-c", "if True:" + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "card" in names, done.stderr
