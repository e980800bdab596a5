"""The harness of the studies: what runs, resumes and stops, what is refused, and what the pages say."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import false_discovery_control
from transformers import AutoModel, AutoTokenizer

from benchmarks.reproduction import report, run
from benchmarks.reproduction.design import Claim, Method, Stage, Study
from benchmarks.reproduction.studies import STUDIES
from m3bert import trainers
from m3bert.trainers import ContrastiveTrainer
from m3bert.trainers.core.checkpoints import complete_checkpoints
from tests.conftest import refused
from tests.evaluation_data import write_rows


MRL = Method("contrastive", {"grid": "2,6x8,32"})
SETTINGS = {"per_device_train_batch_size": 4, "max_length": 16, "use_cpu": True, "save_steps": 2}
TINY = Study(
    name="tiny", title="A study", source="nobody",
    methods={"MRL": MRL, "deep MRL": replace(MRL, settings={"grid": "6x8,32"})}, backbones=("real",), grid="2,6x8,32",
    steps=2, settings=SETTINGS, learning_rates=(1e-4, 1e-3), development=("stsb-dev",),
    families={"similarity": ("stsb",), "pairs": ("mrpc",)}, claims=(Claim("MRL", "deep MRL", "2x8,32", "nobody"),),
)  # fmt: skip


@pytest.fixture
def place(tiny_checkpoint, sentences, tmp_path, monkeypatch) -> dict[str, Any]:
    """Small data, a tiny backbone, and folders for a run; no commit is checked."""
    data = tmp_path / "data"
    pairs = [{"sentence1": a, "sentence2": b} for a, b in zip(sentences[:24], sentences[24:48], strict=True)]
    for split in ("dev", "test"):
        write_rows(data / "stsb" / f"{split}.jsonl.gz", [{**pair, "score": n % 6} for n, pair in enumerate(pairs)])
    write_rows(data / "mrpc" / "test.jsonl.gz", [{**pair, "label": n % 2} for n, pair in enumerate(pairs)])
    dataset = run.Dataset.from_dict({"anchor": sentences[:24] * 5, "positive": sentences[24:48] * 5})
    monkeypatch.setitem(run.TRAINING_DATA, "pairs", lambda data: dataset)
    loaded = AutoTokenizer.from_pretrained(tiny_checkpoint)
    monkeypatch.setattr(run, "backbone", lambda name, cache: (AutoModel.from_pretrained(tiny_checkpoint), loaded))
    return {"data": data, "cache": tmp_path / "cache", "results": tmp_path / "results"}


def development(study: Study = TINY) -> list[run.Planned]:
    return list(run.planned(study, development=True))


def fake(study: Study, method: str, seed: int, value: float, backbone: str = "real", **changes: Any) -> dict[str, Any]:
    """The results of a run whose scores are all `value`."""
    grid = [str(g) for g in report.Grid.parse(study.grid)]
    return {
        "study": study.name, "method": method, "backbone": backbone, "seed": seed, "learning_rate": 1e-4,
        "date": "2026-01-01", "machine": "x86_64", "threads": 1, "seconds": {"training": 1.0}, "resumed": False,
        "arguments": {}, "scores": {task: dict.fromkeys(grid, value) for task in study.tests}, **changes,
    }  # fmt: skip


def test_finished_runs_are_skipped_and_record_what_they_were(place, monkeypatch):
    assert run.run_all(development()[:2], **place) == []
    first = development()[0].file(place["results"])
    found = json.loads(first.read_text())
    assert (found["method"], found["seed"], found["learning_rate"], found["split"]) == ("MRL", 0, 1e-4, "development")
    assert found["arguments"]["max_steps"] == 2 and found["arguments"]["grid"] == "2,6x8,32"
    assert found["scores"]["stsb-dev"].keys() == {"2x8", "2x32", "6x8", "6x32"}
    assert str(place["cache"]) not in first.read_text()
    assert not list((place["cache"] / "runs" / "tiny").iterdir()), "checkpoints of finished runs are removed"
    monkeypatch.setattr(run, "execute", None)
    run.run_all(development()[:2], **place)


class Killed(BaseException):
    pass


def test_a_killed_run_continues_with_its_checkpoint_and_ends_with_the_same_scores(place, tmp_path, monkeypatch):
    study = replace(TINY, steps=4)
    planned = development(study)[0]
    elsewhere = {**place, "cache": tmp_path / "whole" / "cache", "results": tmp_path / "whole" / "results"}
    run.run_all([planned], **elsewhere)
    work = place["cache"] / "runs" / "tiny" / planned.name

    class Dying(ContrastiveTrainer):
        def training_step(self, *arguments: Any, **options: Any) -> Any:
            if self.state.global_step == 3:
                raise Killed
            return super().training_step(*arguments, **options)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(trainers, "ContrastiveTrainer", Dying)
        run.run_all([planned], **place)
    assert [Path(folder).name for folder in complete_checkpoints(work / "checkpoints")] == ["checkpoint-2"]
    with monkeypatch.context() as patched:
        patched.setattr(run, "evaluate_grid", None)
        with pytest.raises(TypeError):  # killed again, after training
            run.run_all([planned], **place)
    with monkeypatch.context() as patched:
        patched.setattr(Method, "train", None)
        run.run_all([planned], **place)
    found, whole = (json.loads(planned.file(its["results"]).read_text()) for its in (place, elsewhere))
    assert found["scores"] == whole["scores"] and (found["resumed"], whole["resumed"]) == (True, False)


@pytest.mark.parametrize(
    ("frozen", "message"), [(None, "not frozen"), ("0" * 40, "not an ancestor"), ("HEAD~1", None)]
)
def test_tests_are_scored_only_with_frozen_settings(place, frozen, message, monkeypatch):
    study = replace(TINY, frozen={"real": frozen} if frozen else {}, learning_rates=(1e-4,), backbones=("real",))
    planned = list(run.planned(study, development=False))[:1]
    if message is None:
        run.run_all(planned, **place)
        found = json.loads(planned[0].file(place["results"]).read_text())
        assert found["frozen"] == frozen and found["scores"].keys() == {"stsb", "mrpc"}
        return
    refused(message, run.run_all, planned, **place)
    assert not planned[0].file(place["results"]).exists()


def test_the_learning_rate_is_the_best_on_development_tasks(tmp_path):
    folder = tmp_path / "tiny" / "development"
    folder.mkdir(parents=True)
    for rate, value in ((1e-4, 0.4), (1e-3, 0.5)):
        found = fake(TINY, "MRL", 0, value, learning_rate=rate)
        (folder / f"{rate}.json").write_text(json.dumps(found))
    assert run.chosen_rate(TINY, "MRL", "real", tmp_path) == 1e-3
    with pytest.raises(ValueError, match=r"deep MRL on real has no development run at 0\.0001, 0\.001"):
        run.chosen_rate(TINY, "deep MRL", "real", tmp_path)


def test_all_methods_have_the_same_seeds_and_others_are_left_out():
    three = replace(TINY, methods={"a": MRL, "b": MRL, "c": MRL})
    runs = {(method, seed): {} for method in "ab" for seed in (0, 1)} | {("c", 0): {}}
    assert report.equal_seeds(three, runs) == ([0, 1], ["a", "b"], ["c"])
    del runs["b", 1]
    assert report.equal_seeds(three, runs) == ([0], ["a", "b", "c"], [])


def values(first: tuple[float, ...], second: tuple[float, ...]) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (method, seed): fake(TINY, method, seed, value)
        for method, its in (("MRL", first), ("deep MRL", second))
        for seed, value in enumerate(its)
    }


def verdict_of(study, claim: Claim, runs) -> tuple[str, str]:
    """The verdict on the only claim of a study."""
    (verdict,) = report.verdicts_of(replace(study, claims=(claim,)), list(runs.values())).values()
    return verdict


def test_a_verdict_is_corrected_for_the_number_of_claims():
    """One difference with a p-value of 0.04 among nineteen that are noise."""
    clear, noise = report.Difference((0.2, 0.3, 0.15)), report.Difference((1.0, -1.1, 0.2))
    p_values = [clear.p_value(0.0), *[noise.p_value(0.0)] * 19]
    assert 0.03 < p_values[0] < 0.05 < p_values[1] and clear.mean > clear.half_width
    first, *_ = false_discovery_control(p_values)
    assert report.verdict(clear, 0.0, p_values[0])[1] == "holds"
    assert report.verdict(clear, 0.0, first)[1] == "not clear after the correction"


@pytest.mark.parametrize(
    ("first", "second", "holds", "bold"),
    [
        ((0.50, 0.51, 0.52), (0.40, 0.41, 0.42), "holds", True),
        ((0.40, 0.41, 0.42), (0.50, 0.51, 0.52), "does not hold here: it is lower", True),
        ((0.50, 0.60, 0.52), (0.49, 0.65, 0.41), "not clear", False),
        ((0.50,), (0.40,), "not testable here: one seed", False),
        ((0.50, 0.51), (), "not testable here: no complete runs of deep MRL", False),
    ],
)
def test_verdicts_and_bold_are_by_paired_differences(first, second, holds, bold):
    runs = values(first, second)
    assert verdict_of(TINY, TINY.claims[0], runs)[1] == holds
    seeds, methods, _ = report.equal_seeds(TINY, runs)
    assert ("**" in report.table(TINY, runs, seeds, methods, "pairs")) == bold


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_pages_say_what_the_results_say(page):
    text = page.read_text(encoding="utf-8")
    again = report.written(text, every_table=report.PAGES[page])
    assert again == text, "run python -m benchmarks.reproduction.report"
    assert len(report.MARKED.findall(text)) == text.count("<!-- end of ") > 0


NUMBER = re.compile(r"(?<![\w.])(\d+\.\d+|\d+(?= ?%))(?!\w)")
# Of QAMA's paper, of OpenSearch's model card, and the confidence of the intervals.
NO_RESULTS = {"24.3", "37.1", "97.1", "50.4", "95"}


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_a_number_in_the_prose_is_in_a_table_of_its_section(page):
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        made = set(NUMBER.findall("".join(found.group() for found in report.MARKED.finditer(section))))
        by_hand = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", report.MARKED.sub("", section), flags=re.DOTALL)
        if page.name != "speed.md" and (made or page.name in ("studies.md", "NOTES.md")):
            assert set(NUMBER.findall(by_hand)) - made - NO_RESULTS == set(), section.partition("\n")[0]


def test_a_backbone_without_training_is_scored_once_and_compared_with_every_seed(place):
    methods = {"untouched": replace(MRL, untouched=True), "MRL": MRL}
    study = replace(TINY, methods=methods, frozen={"real": "HEAD~1"})
    assert not any(its.method == "untouched" for its in run.planned(study, development=True))
    its, *others = (each for each in run.planned(study, development=False) if each.method == "untouched")
    assert (its.seed, others) == (0, [])
    run.run_all([its], **place)
    found = json.loads(its.file(place["results"]).read_text())
    assert (found["learning_rate"], found["arguments"]) == (None, {})
    runs = report.runs_on(study, [found, *(fake(study, "MRL", seed, 0.5) for seed in (0, 1, 2))], "real")
    assert report.equal_seeds(study, runs) == ([0, 1, 2], ["untouched", "MRL"], [])


def test_runs_on_backbones_that_were_made_apart_are_not_compared():
    runs = [fake(TINY, "MRL", seed, 0.5, weights=weights) for seed, weights in ((0, "one"), (1, "other"))]
    assert len(report.runs_on(TINY, [runs[0], {**runs[1], "weights": "one"}], "real")) == 2
    refused("of several backbones", report.runs_on, TINY, runs, "real")


def earlier(study: Study, method: str, seed: int, value: float) -> dict[str, Any]:
    """Results of an earlier script."""
    found = fake(study, method, seed, value)
    return {key: value for key, value in found.items() if key not in ("arguments", "seconds", "threads", "resumed")}


def test_results_of_an_earlier_script_count_until_they_are_replaced(place, monkeypatch):
    study = replace(TINY, learning_rates=(1e-4,))
    first, second = (its for its in run.planned(study, development=False) if its.seed == 0)
    for its in (first, second):
        file = its.file(place["results"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(earlier(study, its.method, 0, 0.5)))
    text = report.section(study, every_table=True, results=place["results"])
    assert "from an earlier script" in text and "| 2x8 | 50.0 | 50.0 |" in text
    ran: list[run.Planned] = []
    monkeypatch.setattr(run, "execute", lambda planned, *_: ran.append(planned) or fake(study, "MRL", 0, 0.4))
    run.run_all([first, second], **place)
    assert ran == [first, second]
    runs = [fake(study, "MRL", 0, 0.4), earlier(study, "deep MRL", 0, 0.5)]
    assert report.runs_on(study, runs, "real").keys() == {("MRL", 0)}, "the two are not compared"


def test_a_model_with_a_head_is_measured_and_then_fine_tuned_as_an_encoder(place, tiny_masked_lm, monkeypatch):
    pieces = run.Dataset.from_dict({"input_ids": [[5, 6, 7, 8, 9, 10]] * 40})
    monkeypatch.setitem(run.TRAINING_DATA, "text", lambda data: pieces)
    monkeypatch.setattr(run, "held_out_text", lambda data: pieces)
    tokenizer = run.backbone("real", place["cache"])[1]
    monkeypatch.setattr(run, "backbone", lambda name, cache: (deepcopy(tiny_masked_lm), tokenizer))
    then = Stage("contrastive", {**SETTINGS, "grid": "6x8,32", "max_steps": 1})
    study = replace(
        TINY,
        methods={
            "pretrained": replace(MRL, untouched=True, then=then),
            "MLM": Method("multigranular-mlm", then=then),
        },
        settings={"per_device_train_batch_size": 4, "use_cpu": True},
        learning_rates=(1e-2,),
        frozen={"real": "HEAD~1"},
        training_data="text",
        test_length=16,
        families={"similarity": ("stsb",)},
        losses=("masked tokens",),
    )
    planned = list(run.planned(study, development=False))
    assert len(planned) == 6, "fine-tuning has a seed"
    run.run_all(planned[:2], **place)
    first, second = (json.loads(its.file(place["results"]).read_text()) for its in planned[:2])
    assert first["then"]["max_steps"] == second["then"]["max_steps"] == 1 and second["arguments"]["max_steps"] == 2
    losses = [found["losses"]["masked tokens"] for found in (first, second)]
    assert losses[0].keys() == losses[1].keys() and losses[0] != losses[1]
    assert first["scores"].keys() == {"stsb"}


def test_a_loss_is_better_when_it_is_lower():
    study = replace(TINY, losses=("masked tokens",), grid="2x8")
    claim = Claim("MRL", "deep MRL", "2x8", "nobody", "masked tokens")
    runs = {
        (name, seed): fake(TINY, name, seed, 0.5, losses={"masked tokens": {"2x8": loss + 0.002 * seed}})
        for name, loss in (("MRL", 5.5), ("deep MRL", 5.6))
        for seed in (0, 1)
    }
    assert verdict_of(study, claim, runs) == ("+0.100 ± 0.000, 2 seeds", "holds")
    table = report.table(study, runs, [0, 1], ["MRL", "deep MRL"], "masked tokens")
    assert table.splitlines()[2] == "| 2x8 | **5.501 ± 0.001** | 5.601 ± 0.001 |"


def test_a_claim_about_speed_is_tested_with_the_seconds_of_training():
    claim = Claim("MRL", "deep MRL", "", "nobody", speed=True)
    runs = {
        (name, seed): fake(TINY, name, seed, 0.5, seconds={"training": seconds, "evaluation": 9.0})
        for name, seconds in (("MRL", 1.0), ("deep MRL", 2.0))
        for seed in (0, 1)
    }
    assert verdict_of(TINY, claim, runs) == ("+1.0 ± 0.0, 2 seeds", "holds")
    runs = {key: earlier(TINY, *key, 0.5) for key in runs}
    assert verdict_of(TINY, claim, runs) == ("", "not testable here: no seconds")


def test_every_method_has_arguments_that_its_configuration_takes(tmp_path):
    for study in STUDIES.values():
        for method in (*study.methods.values(), *study.replacements.values()):
            settings = {**study.settings, **method.settings, "max_steps": study.steps, "use_cpu": True}
            method.classes[0](output_dir=str(tmp_path), **settings)
        assert {name for claim in study.claims for name in (claim.better, claim.worse)} <= study.methods.keys()
