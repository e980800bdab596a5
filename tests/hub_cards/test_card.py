"""The card of a real run: what it says is what was recorded and measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hub_cards.checkpoint import Checkpoint
from hub_cards.costs import costs
from hub_cards.metadata import Statements
from hub_cards.publication import Options, describe, prepare
from modeling_m3bert import M3BertForMaskedLM, M3BertForSequenceClassification, M3BertModel
from tests.conftest import tiny_config
from tests.published import GRID, TASKS, contrastive_trainer, evaluated
from trainers import Granularity, Grid


SAID = Statements("apache-2.0", ("en",), ("user/pairs",), "user/base", ("documentation",))


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_tokenizer, sentences) -> Path:
    """Folder of a finished run, with its results."""
    folder = tmp_path_factory.mktemp("run")
    trainer = contrastive_trainer(folder / "output", tiny_tokenizer, sentences, learning_rate=3e-4)
    trainer.train()
    trainer.save_model()
    evaluated(folder / "output", folder / "data", sentences).save(folder / "results.json")
    return folder


@pytest.fixture
def published(run, tmp_path) -> Path:
    """The same, laid out."""
    return lay_out(run, tmp_path / "published")


def lay_out(run: Path, folder: Path, previous: str | None = None, **options) -> Path:
    from trainers.evaluation import GridResults

    folder.mkdir()
    results = GridResults.load(run / "results.json")
    prepare(Checkpoint(run / "output"), folder, "user/model", Options(statements=SAID, **options), results, previous)
    return folder


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
        "24 rows with columns text, other",
        "huggingface.co/papers/2605.19568",
        "Eqs. 1 and 4",
        "| `learning_rate` | `0.0003` |",
        "| `max_steps` | `2` |",
        "| `max_length` | `40` |",
        "[user/base](https://huggingface.co/user/base)",
        "pair classification, bitext mining",
        "@misc{",
    ):
        assert said in text, said
    assert "weight_decay" not in text  # a default
    assert "output_dir" not in text and str(published) not in text


def test_every_granularity_has_its_costs_and_scores(published):
    text = ModelCard.load(published / "README.md").text
    for g in Grid.parse(GRID):
        assert len(re.findall(rf"^\| {g} \|", text, re.MULTILINE)) >= 2 + len(TASKS)
    assert "ms to encode" in text and "| 8x" not in text


def test_rendering_again_is_idempotent_and_what_a_person_wrote_stays(published, run, tmp_path):
    card = (published / "README.md").read_text()
    again = (lay_out(run, tmp_path / "again", card) / "README.md").read_text()
    assert again == card
    edited = card.replace("## Limits\n", "## Limits\n\n- Do not use it for poetry.\n")
    edited = edited.replace("license: apache-2.0", "license: apache-2.0\nthumbnail: figures/me.png")
    edited += "\n## Thanks\n\nTo all.\n"
    third = (lay_out(run, tmp_path / "third", edited) / "README.md").read_text()
    assert "Do not use it for poetry." in third and "To all." in third and "thumbnail: figures/me.png" in third
    assert (lay_out(run, tmp_path / "fourth", third) / "README.md").read_text() == third


def test_a_persons_statements_stay_where_nobody_says_otherwise(run, tmp_path):
    previous = "---\nlicense: mit\nlanguage: de\nbase_model: a/b\ntags:\n- mine\n---\n\n# Old\n"
    describe_into(run, tmp_path / "kept", Options(), previous)
    data = ModelCard.load(tmp_path / "kept" / "README.md").data
    assert (data.license, data.language, data.base_model) == ("mit", "de", "a/b") and "mine" in data.tags
    describe_into(run, tmp_path / "said", Options(statements=Statements("apache-2.0")), previous)
    assert ModelCard.load(tmp_path / "said" / "README.md").data.license == "apache-2.0"


def describe_into(run: Path, folder: Path, options: Options, previous: str | None) -> None:
    folder.mkdir()
    prepare(Checkpoint(run / "output"), folder, "user/model", options, None, previous)


def test_without_an_evaluation_the_card_says_so(run, tmp_path):
    describe_into(run, tmp_path / "plain", Options(), None)
    card = ModelCard.load(tmp_path / "plain" / "README.md")
    assert "This checkpoint was not evaluated." in card.text and "quality, at any granularity" in card.text
    assert "Time was not measured." in card.text and "model-index" not in card.data.to_dict()
    assert not (tmp_path / "plain" / "figures").exists()


@pytest.mark.parametrize("text", ["a: [", "- a\n- b"])
def test_a_card_with_broken_metadata_is_refused(run, tmp_path, text):
    with pytest.raises(ValueError):
        describe_into(run, tmp_path / "broken", Options(), f"---\n{text}\n---\n")


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


def test_costs_are_those_of_the_model_that_is_built():
    """Against the model itself and the usual count: two operations a weight and token, and attention."""
    config = tiny_config()
    found = costs(config, Grid.parse("2x8,6x32"))
    for g, cost in found.items():
        model = M3BertModel(tiny_config(output_layer=g.layer))
        assert cost.parameters == sum(p.numel() for p in model.parameters())
        width, inner, tokens = config.hidden_size, config.intermediate_size, 48  # all of its positions
        weights = g.layer * (4 * width**2 + 3 * width * inner)
        assert cost.flops_a_token == 2 * weights + g.layer * 4 * tokens * width
    assert found[Granularity(2, 8)].vector_bytes("int8") == 8 and found[Granularity(2, 8)].vector_bytes("1 bit") == 1


def recorded(folder: Path, tokenizer, sentences, **changes) -> str:
    """The card of a run with these settings."""
    trainer = contrastive_trainer(folder, tokenizer, sentences, **changes)
    trainer.save_model()
    describe(Checkpoint(folder), "user/model", Options())
    return (folder / "README.md").read_text()


def test_what_was_trained_is_what_the_run_trained(tmp_path, tiny_tokenizer, sentences):
    """Not what the lists of the config, which are products and hold the full size, would make of it."""
    card = recorded(tmp_path / "pairs", tiny_tokenizer, sentences, grid="2x8,4x16")
    assert "at the granularities (layers x dims) `2x8,4x16`" in card and "- matryoshka" in card
    full = recorded(tmp_path / "full", tiny_tokenizer, sentences, grid="6x32")
    assert "Trained to be read" not in full and "- matryoshka" not in full
    assert "No layer but the last and no prefix was trained" in full


def test_a_projection_promises_no_granularities(tmp_path, tiny_tokenizer, sentences):
    card = recorded(tmp_path / "run", tiny_tokenizer, sentences, grid=None, projection_dim=16)
    assert "vectors of 16 numbers" in card and "The projection belongs to the last layer" in card
    assert "output_layer" not in card and "Trained to be read" not in card and "- matryoshka" not in card


def test_results_of_geometry_alone_have_no_table_of_means(run, tmp_path):
    from trainers.evaluation import GridResults

    results = GridResults.load(run / "results.json")
    results.scores = [replace(score, family="geometry") for score in results.scores if score.task == "stsb"]
    (tmp_path / "geometry").mkdir()
    prepare(Checkpoint(run / "output"), tmp_path / "geometry", "user/model", Options(), results)
    card = (tmp_path / "geometry" / "README.md").read_text()
    assert "None" not in card and "Means of each family" not in card and "geometry (spearman)" in card


def test_own_tags_go_when_they_are_not_true_any_more(run, tmp_path):
    previous = "---\ntags:\n- onnx\n- mine\n---\n"
    describe_into(run, tmp_path / "again", Options(), previous)
    tags = ModelCard.load(tmp_path / "again" / "README.md").data.tags
    assert "onnx" not in tags and "mine" in tags
