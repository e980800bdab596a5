"""The card of a run says what was recorded and measured, in its text and metadata; what a person wrote stays."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import BertConfig, BertModel

from m3bert.evaluation import GridResults, find_task
from m3bert.hub_cards.card import render_card
from m3bert.hub_cards.card_source import CardSource
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.metadata import Statements
from m3bert.hub_cards.publication import Options, prepare, write_card_and_results
from m3bert.hub_cards.scores import card_results
from m3bert.hub_cards.sections import generated, join, merge, parse
from m3bert.hub_cards.training_record import TrainingRecord, parts_of
from m3bert.modeling import (
    M3BertForMaskedLM,
    M3BertForSequenceClassification,
    M3BertForTokenClassification,
    M3BertModel,
)
from m3bert.trainers import Grid, MIPICConfig, Objective
from m3bert.utils.papers import M3BERT, MIPIC, MRL, Identity, Paper
from tests.conftest import quiet, refused, save, tiny_config
from tests.published import GRID, TASKS, contrastive_trainer, save_with_exits


SAID = Statements("apache-2.0", ("en",), ("user/pairs",), "user/base", ("documentation",))


@pytest.fixture(scope="module")
def published(run, tmp_path_factory) -> Path:
    """The run, laid out."""
    return lay_out(run, tmp_path_factory.mktemp("cards") / "published")


def lay_out(run: Path, folder: Path, previous: str | None = None, said: Statements = SAID, scored=True) -> Path:
    folder.mkdir()
    results = GridResults.load(run / "results.json") if scored else None
    prepare(Checkpoint(run / "output"), folder, "user/model", Options(statements=said), results, previous)
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


class OwnLoss(Objective):
    """A user's own objective, of which nothing is on record but its class."""


@pytest.fixture(scope="module", params=["m3bert", "bert"])
def checkpoint(request, tmp_path_factory, tiny_tokenizer) -> Path:
    """Folder of a tiny encoder of six layers and width 32, whose training record a test writes."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = M3BertModel(tiny_config()) if request.param == "m3bert" else BertModel(BertConfig(vocab_size=99, **sizes))
    return save(folder, model, tiny_tokenizer)


def card_of(folder: Path, identity: Identity, grid: str, **changes) -> ModelCard:
    """The card of a checkpoint that was trained with this objective."""
    record = TrainingRecord(
        trainer="SomeTrainer", objective=identity.name, parts=parts_of(identity), tags=list(identity.tags), grid=grid,
        base_model=None, earlier=[], settings={"learning_rate": 0.1, "note": "a|b"}, columns=["text"], rows=8,
        datasets=[], steps=1, batch_size=8, seed=0,
    )  # fmt: skip
    replace(record, **changes).save(folder)
    return render_card(CardSource("user/model", Checkpoint(folder)))


def cited(text: str) -> list[str]:
    """Titles of the BibTeX entries of a card."""
    return re.findall(r"^  title = \{\{(.+)\}\},$", section(text, "citation"), re.MULTILINE)


def test_the_card_names_exactly_the_parts_and_cites_exactly_their_papers(checkpoint, tmp_path):
    config = MIPICConfig(**quiet(tmp_path))
    grid = config.grid_for(tiny_config())
    identity = config.build_objective(grid).identity
    card = card_of(checkpoint, identity, str(grid))
    training = section(card.text, "training")
    assert "- Objective: MRL + SIA + PIC, the weighted sum" in training
    table = rows(training, "| loss | weight | what it computes | papers |")
    papers = {"MRL": (0.4, MRL), "SIA": (0.6, MIPIC), "PIC": (0.6, MIPIC)}
    for row, (part, (weight, paper)), said in zip(table, papers.items(), identity.parts, strict=True):
        link = f"[{paper.title}](https://huggingface.co/papers/{paper.id})"
        assert row == [part, f"{weight:g}", said.equation, link]
    architecture = [M3BERT.title] if Checkpoint(checkpoint).elastic else []
    assert cited(card.text) == [*architecture, MRL.title, MIPIC.title]
    assert set(identity.tags) - {"matryoshka"} <= set(card.data.tags)


def test_an_objective_of_ones_own_needs_no_papers_and_may_have_some(checkpoint):
    text = card_of(checkpoint, OwnLoss(Grid.parse("6x32")).identity, "6x32").text
    header = "| loss | what it computes | papers |"
    assert rows(section(text, "training"), header) == [["OwnLoss", "not on record", "none"]]
    elastic = Checkpoint(checkpoint).elastic
    assert cited(text) == ([M3BERT.title] if elastic else [])
    paper = Paper("A loss", "2601.00001", ("Somebody Else",))
    card = card_of(checkpoint, Identity("Own", "KL(p || q)", (paper,), ("mine",)), "6x32")
    training = section(card.text, "training")
    assert rows(training, header) == [["Own", "KL(p || q)", "[A loss](https://huggingface.co/papers/2601.00001)"]]
    assert "A loss" in cited(card.text) and "mine" in card.data.tags
    assert rows(training, "| setting | value |") == [["`learning_rate`", "`0.1`"], ["`note`", "`a|b`"]]


def test_exits_that_were_trained_are_told_apart_from_exits_that_were_fitted(tmp_path, tiny_tokenizer, sentences):
    save_with_exits(tmp_path, tiny_tokenizer, sentences, paths={4: [1, 2, 5, 6]})
    fitted = render_card(CardSource("user/model", Checkpoint(tmp_path))).text
    trained = card_of(tmp_path, OwnLoss(Grid.parse("2,6x8,32")).identity, "2,6x8,32").text
    assert "maps that were fitted without training" in section(fitted, "summary")
    assert "these granularities (layers x dims), and at no others: `2,6x8,32`" in section(trained, "summary")
    assert "before the training" in section(trained, "exits") and "before the training" not in section(fitted, "exits")
    assert "\n| 0 |" in section(trained, "costs"), "an exit can be read, trained or not"
    assert "Depth 4 is a path: it runs the layers 1, 2, 5 and 6." in fitted
    assert "read the static table" in fitted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rows": 2055, "files": ["pairs.jsonl"]},
            "2,055 rows with the columns `text` of the local file `pairs.jsonl`",
        ),
        (
            {"rows": None, "datasets": ["user/a"], "files": ["b.csv", "c.csv"], "columns": ["text", "label"]},
            "a stream of rows with the columns `text`, `label` of the data set "
            "[user/a](https://huggingface.co/datasets/user/a), the local file `b.csv`, the local file `c.csv`",
        ),
        (
            {"sets": {"one": 1000, "two": 24}, "rows": 1024, "columns": []},
            "1,024 rows in 2 sets (`one` 1,000, `two` 24); their source is not on record",
        ),
        ({"rows": 0}, "rows with the columns `text`; their source is not on record"),
    ],
)
def test_the_card_names_the_training_data(checkpoint, changes, said):
    card = card_of(checkpoint, OwnLoss(Grid.parse("6x32")).identity, "6x32", **changes)
    assert f"- Data: {said}\n" in section(card.text, "training")


# --- The whole card of a run ------------------------------------------------------------------------------------


def test_the_metadata_is_read_by_the_hubs_own_loader_with_every_granularity(published, run):
    data = ModelCard.load(published / "README.md").data
    assert (data.license, data.language, data.base_model) == ("apache-2.0", ["en"], "user/base")
    assert (data.library_name, data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    assert data.datasets == ["user/pairs"] and {"m3bert", "matryoshka", "documentation"} <= set(data.tags)
    scores = json.loads((run / "results.json").read_text())["scores"]
    expected = {(s["task"], s["granularity"], s["metric"]): s["value"] for s in scores if s["main"]}
    entries = {
        (e.dataset_name, "{layer}x{dim}".format(**e.metric_args), e.metric_type): e.metric_value
        for e in data.eval_results
    }
    assert entries == pytest.approx(expected, abs=1e-6)
    assert len(data.eval_results) == len(TASKS) * len(Grid.parse(GRID))


def test_the_first_screen_is_one_figure_one_table_and_short_lines_to_load_it(published):
    """All that is not for a choice in half a minute is folded."""
    text = ModelCard.load(published / "README.md").text
    names = [part.name for part in parse(text)]
    shown = ["summary", "sizes", "usage", "costs", "evaluation", "training", "limits", "citation"]
    assert names == shown
    sizes = section(text, "sizes")
    assert re.findall(r"!\[.*\]\((.*)\)", sizes) == ["figures/quality_and_latency.png"]
    assert text.count("figures/quality_and_latency.png") == 1
    table = rows(sizes, "| size | nDCG@10, % | kept, % | ms per query | bytes per vector |")
    assert 2 <= len(table) <= 8 and ["100.0"] == [share for size, _, share, *_ in table if size == "`6x32`"]
    assert "Base model: [user/base]" in section(text, "summary")
    open_text = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert open_text.count("\n| ---") == 1 and "SHA-256 |" not in open_text
    snippets = re.findall(r"```\w+\n(.*?)```", open_text.partition("## Training")[0], re.DOTALL)
    assert len(snippets) == 2 and all(len(snippet.splitlines()) <= 8 for snippet in snippets)
    assert text.count("<details>") == text.count("</details>") == len(re.findall("</details>\n", text))


def test_a_card_advises_the_fastest_size_that_keeps_most(run):
    results = GridResults.load(run / "results.json")
    values = {"2x32": 0.1, "4x32": 0.46, "6x32": 0.5}
    results.grid = "2,4,6x32"
    results.scores = [
        replace(score, value=values[score.granularity]) for score in results.scores if score.granularity in values
    ]
    results.latency = replace(results.latency, encode_ms={"2": 1.0, "4": 4.0, "6": 9.0}, search_ms={"32": 1.0})

    def sizes() -> str:
        return section(str(render_card(CardSource("user/model", Checkpoint(run / "output"), results))), "sizes")

    assert "Load `4x32`: it keeps 92.0% of the nDCG@10 of `6x32`, in 50.0% of the time." in sizes()
    values["4x32"] = 0.4
    results.scores = [replace(score, value=values[score.granularity]) for score in results.scores]
    assert "No smaller size keeps 90% of the nDCG@10 of `6x32`." in sizes()
    results.latency = None
    assert "| `2x32` | 10.0 | 20.0 | 128 |" in sizes() and "Time" not in sizes()


def test_every_link_and_figure_is_in_the_folder(published):
    targets = re.findall(r"\]\(([^)]+)\)", ModelCard.load(published / "README.md").text)
    inside = [target for target in targets if not target.startswith("https://huggingface.co/")]
    assert {"results.json"} < set(inside) and sum(target.startswith("figures/") for target in inside) >= 4
    assert all((published / target).is_file() for target in inside)


def test_the_card_has_the_run_its_tasks_and_every_granularity(published, run):
    text = ModelCard.load(published / "README.md").text
    assert "`ContrastiveTrainer`, 2 steps of 8 rows" in text
    assert "| `learning_rate` | `0.0003` |" in text and "weight_decay" not in text  # a default
    assert "output_dir`" not in text and str(published) not in text
    table = {row[0]: row[1:] for row in rows(text, "| task | type | score | texts | what it is |")}
    counted = GridResults.load(run / "results.json").texts
    assert set(table) == {f"`{task}`" for task in TASKS}
    assert table["`stsb`"][2] == f"{counted['stsb']['sentence1']} pairs"
    assert table["`cranfield`"][2] == "{queries} queries, {documents} documents".format(**counted["cranfield"])
    assert [row[3] for row in table.values()] == [find_task(task).about for task in TASKS]
    results = GridResults.load(run / "results.json")
    for g in Grid.parse(GRID):
        (row,) = re.findall(rf"^\| {g} \|.*", text, re.MULTILINE)  # no table repeats the sizes of another
        assert all(f" {100 * results.quality([task])[g]:.1f} |" in row for task in TASKS)


def test_a_card_names_own_data_unknown_tasks_and_data_that_was_trained_on(run):
    results = GridResults.load(run / "results.json")
    results.settings["own_data"] = {"stsb": "mine.csv"}
    results = replace(results, scores=[replace(s, task=s.task.replace("cranfield", "theirs")) for s in results.scores])
    said = Statements(datasets=("mteb/banking77",))
    text = str(render_card(CardSource("user/model", Checkpoint(run / "output"), results, said)))
    table = {row[0]: row[1:] for row in rows(text, "| task | type | score | texts | what it is |")}
    assert table["`stsb`"][3] == "own data: `mine.csv`" and table["`theirs`"][2:] == ["", ""]
    limits = section(text, "limits")
    assert "It was trained on `mteb/banking77`, where `banking77` is from" in limits and "`stsb` is from" not in limits


def test_rendering_again_is_idempotent_and_what_a_person_wrote_stays(published, run, tmp_path):
    card = (published / "README.md").read_text()
    edited = card.replace("## Limits\n", "## Limits\n\n- Do not use it for poetry.\n")
    edited = edited.replace("license: apache-2.0", "license: apache-2.0\nthumbnail: figures/me.png")
    edited += "\n## Thanks\n\nTo all.\n"
    second = (lay_out(run, tmp_path / "second", edited) / "README.md").read_text()
    assert "Do not use it for poetry." in second and "To all." in second and "thumbnail: figures/me.png" in second
    assert (lay_out(run, tmp_path / "third", second) / "README.md").read_text() == second


def test_a_persons_statements_stay_unless_there_are_new_ones(run, tmp_path):
    previous = "---\nlicense: mit\nlanguage: de\nbase_model: a/b\npipeline_tag: fill-mask\n"
    previous += "tags:\n- mine\n- onnx\n---\n\n# Old\n"
    data = ModelCard.load(lay_out(run, tmp_path / "kept", previous, Statements(), False) / "README.md").data
    assert (data.license, data.language, data.base_model) == ("mit", "de", "a/b")
    assert "mine" in data.tags and "onnx" not in data.tags  # no graph is published now
    assert data.pipeline_tag == "sentence-similarity"
    card = lay_out(run, tmp_path / "said", previous, Statements("apache-2.0"), False) / "README.md"
    assert ModelCard.load(card).data.license == "apache-2.0"
    refused("not valid YAML", lay_out, run, tmp_path / "broken", "---\na: [\n---\n")


def test_what_was_not_measured_is_not_shown(run, tmp_path):
    card = ModelCard.load(lay_out(run, tmp_path / "plain", scored=False) / "README.md")
    assert "This checkpoint was not evaluated." in card.text and "model-index" not in card.data.to_dict()
    assert not (tmp_path / "plain" / "figures").exists()
    results = GridResults.load(run / "results.json")
    results.scores = [replace(score, task_type="geometry") for score in results.scores if score.task == "stsb"]
    text = str(render_card(CardSource("user/model", Checkpoint(run / "output"), results)))
    assert "None" not in text and "score of each type" not in text and "geometry (spearman)" in text


# --- Other checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_class, tag, head",
    [
        (M3BertForMaskedLM, "fill-mask", 'pipeline("fill-mask"'),
        (M3BertForSequenceClassification, "text-classification", 'pipeline("text-classification"'),
        (M3BertForTokenClassification, "token-classification", 'pipeline("token-classification"'),
        (M3BertModel, "feature-extraction", 'SentenceTransformer("user/model"'),
    ],
)
def test_each_head_has_its_usage(tmp_path, tiny_tokenizer, model_class, tag, head):
    save(tmp_path, model_class(tiny_config()), tiny_tokenizer)
    card = render_card(CardSource("user/model", Checkpoint(tmp_path)))
    assert card.data.pipeline_tag == tag and head in card.text
    assert card.data.library_name == ("sentence-transformers" if model_class is M3BertModel else "transformers")
    assert "Nothing is known about its training." in card.text
    for example in re.findall(r"```python\n(.*?)```", section(card.content, "usage"), re.DOTALL):
        exec(example.replace("user/model", str(tmp_path)), {})


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_the_example_pools_as_the_training_did(tmp_path, tiny_tokenizer, sentences, pooling):
    trainer = contrastive_trainer(tmp_path, tiny_tokenizer, sentences, pooling=pooling)
    trainer.save_model()
    write_card_and_results(Checkpoint(tmp_path), "user/model", Options())
    card = (tmp_path / "README.md").read_text()
    (example,) = re.findall(r"With transformers alone</summary>\n\n```python\n(.*?)```", card, re.DOTALL)
    space: dict = {}
    exec(example.replace("user/model", str(tmp_path)), space)
    size, texts = CardSource("", Checkpoint(tmp_path)).small, ["a man plays the guitar", "someone makes music"]
    expected = Checkpoint(tmp_path).encoder().encode(texts).at(size, normalize=True)
    torch.testing.assert_close(space["vectors"], expected, atol=1e-5, rtol=1e-5)


def test_what_was_trained_is_what_the_run_trained(tmp_path, tiny_tokenizer, sentences):
    """Not what the lists of the config, which are products and hold the full size, would make of it."""

    def recorded(name: str, **changes) -> str:
        contrastive_trainer(tmp_path / name, tiny_tokenizer, sentences, **changes).save_model()
        return str(render_card(CardSource("user/model", Checkpoint(tmp_path / name))))

    card = recorded("pairs", grid="2x8,4x16")
    assert "at these granularities (layers x dims), and at no others: `2x8,4x16`" in card and "- matryoshka" in card
    full = recorded("full", grid="6x32")
    assert "It was trained at" not in full and "- matryoshka" not in full
    assert "Only the full size was trained" in section(full, "summary")
    projected = recorded("run", grid=None, projection_dim=16)
    assert "vectors of 16 numbers" in projected and "The projection belongs to the last layer" in projected
    assert "output_layer" not in projected and "- matryoshka" not in projected


def test_the_extras_are_not_needed_before_they_are_used():
    """Every module of hub_cards can be imported with the core dependencies alone."""
    extras = ("matplotlib", "onnx", "onnxruntime", "onnxscript", "faiss", "sklearn", "scipy", "torchao")
    names = [file.stem for file in Path(sys.modules["m3bert.hub_cards"].__file__).parent.glob("[a-z]*.py")]
    code = f"""
        import importlib
        from importlib.machinery import PathFinder
        find = PathFinder.find_spec
        def find_spec(name, path=None, target=None):
            return None if name.split(".")[0] in {extras} else find(name, path, target)
        PathFinder.find_spec = staticmethod(find_spec)
        for name in {names}:
            importlib.import_module("m3bert.hub_cards." + name)
    """
    done = subprocess.run([sys.executable, "-c", "if True:" + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "card" in names, done.stderr


def test_every_main_score_of_the_model_is_a_result(results, coded):
    """Not the geometry, and not the scores of codes."""
    entries = card_results(results)
    expected = [score for score in results.scores if score.task_type != "geometry"]
    assert [(e.dataset_name, e.metric_type, e.metric_value) for e in entries] == [
        (score.task, score.metric, pytest.approx(score.value, abs=1e-6)) for score in expected
    ]
    first = entries[0]
    assert (first.task_type, first.dataset_type) == ("sentence-similarity", "mteb/stsbenchmark-sts")
    assert (first.metric_name, first.metric_args) == ("spearman at 2x8", {"layer": 2, "dim": 8})
    results.scores = [replace(score, task="mine") for score in results.scores[:1]]
    assert card_results(results)[0].dataset_type == "mine"
    results.settings["own_data"] = {"mine": "user/mine"}
    assert card_results(results)[0].dataset_type == "user/mine"
    floats = [score for score in coded.scores if "@" not in score.granularity]
    assert [(e.dataset_name, e.metric_value) for e in card_results(coded)] == [
        (score.task, pytest.approx(score.value)) for score in floats
    ]


TEMPLATE = "<!-- section: one -->\nfirst VALUE\n<!-- section: two -->\nsecond VALUE\n<!-- section: three -->\nthird\n"
FEWER = TEMPLATE.replace("second VALUE", "")


def sections(value: str = "a", template: str = TEMPLATE):
    return generated(template.replace("VALUE", value))


def names(parts):
    return [section.name for section in parts]


def test_what_was_joined_is_parsed_again_and_new_values_replace_what_nobody_touched():
    new = sections()
    assert parse(join(new)) == new and names(new) == ["one", "two", "three"] and not any(s.edited for s in new)
    assert merge(sections("b"), parse(join(new))) == sections("b")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_an_edited_section_stays_and_the_others_are_new(line_end):
    edited = join(sections("a")).replace("second a", "second, by hand").replace("\n", line_end)
    text = join(merge(sections("b"), parse(edited)))
    assert "first b" in text and "second, by hand" in text and "second b" not in text
    assert merge(sections("c"), parse(text))[1] == parse(text)[1]  # and it stays for good


def test_text_between_parts_stays_in_its_place():
    text = join(sections("a")).replace("<!-- section: two", "My own words.\n\n<!-- section: two") + "\nThe end."
    merged = join(merge(sections("b"), parse(text)))
    places = [merged.index(part) for part in ("first b", "My own words.", "second b", "third", "The end.")]
    assert places == sorted(places)
    assert join(merge(sections("b"), parse(merged))) == merged


def test_an_emptied_section_stays_empty_a_new_one_is_in_its_place_and_one_without_text_goes():
    text = join(sections()).replace("second a\n", "")
    assert "second" not in join(merge(sections("b"), parse(text)))
    fewer = sections(template=FEWER)
    assert names(merge(sections(), parse(join(fewer)))) == ["one", "two", "three"]
    assert names(fewer) == names(merge(fewer, parse(join(sections())))) == ["one", "three"]


def test_a_card_of_another_hand_is_kept_whole():
    merged = merge(sections(), parse("# Somebody's model\n\nIt is good.\n"))
    assert "It is good." in join(merged) and names(merged) == ["one", "two", "three", None]
