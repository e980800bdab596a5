"""Pipelines: stages from one file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from modeling_m3bert import M3BertForMaskedLM
from scripts import pipeline
from scripts.stages import option_list, read_pipeline
from tests.scripts.test_train import model_config
from trainers.core.checkpoints import complete_checkpoints


ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


@pytest.fixture
def content(tmp_path, sentences) -> dict:
    """A pipeline in miniature: tokenizer, rows, training, and the mean of its last two checkpoints."""
    text = tmp_path / "text" / "en" / "a.txt"
    text.parent.mkdir(parents=True)
    text.write_text("\n".join(sentences))
    training = {
        "prepared_data": "{rows}",
        "tokenizer_name": "{tokenizer}",
        "model_config": model_config(),
        "grid": "2,6x8,32",
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "warmup_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return {
        "output_dir": str(tmp_path / "run"),
        "stages": {
            "tokenizer": {"command": "tokenizer", "options": {"files": [f"{text.parent}/*.txt"], "vocab_size": 300}},
            "rows": {
                "command": "prepare",
                "options": {"files": [str(tmp_path / "text")], "tokenizer_name": "{tokenizer}", "max_length": 24},
            },
            "stage1": {"command": "train multigranular-mlm", "options": training},
            "mean": {"command": "average", "options": {"run": "{stage1}", "last": 2}},
        },
    }


def written(folder: Path, content: object) -> Path:
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def command(file: Path) -> list[str]:
    return [sys.executable, "-m", "scripts.pipeline", str(file)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_a_killed_pipeline_continues_with_the_same_weights(content, tmp_path):
    """kill -9 in the middle of a training stage, with all that it started."""
    whole = {**content, "output_dir": str(tmp_path / "whole")}
    (tmp_path / "1").mkdir()
    subprocess.run(command(written(tmp_path / "1", whole)), cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)

    file, stage = written(tmp_path, content), tmp_path / "run" / "stage1"
    process = subprocess.Popen(
        command(file), cwd=ROOT, env=ENVIRONMENT, start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while process.poll() is None and len(complete_checkpoints(stage)) < 3:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert 3 <= len(complete_checkpoints(stage)) < STEPS and not (tmp_path / "run" / "mean").exists()
    tokenizer = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    before = tokenizer.stat().st_mtime_ns

    done = subprocess.run(command(file), cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, text=True)
    assert "tokenizer: finished before" in done.stdout and tokenizer.stat().st_mtime_ns == before
    assert "--resume_from_checkpoint true" in done.stdout
    for name in ("stage1", "mean"):
        models = [M3BertForMaskedLM.from_pretrained(tmp_path / run / name).state_dict() for run in ("whole", "run")]
        assert all(models[0][key].equal(models[1][key]) for key in models[0]), name

    again = subprocess.run(command(file), cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, text=True)
    assert again.stdout.splitlines() == [f"{name}: finished before" for name in content["stages"]]


def test_stages_run_in_order_and_once(content, tmp_path, monkeypatch, capsys):
    started = []

    def run(words):
        started.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(pipeline.subprocess, "run", run)
    content["launcher"] = "torchrun --nproc_per_node 8 -m"
    file = written(tmp_path, content)
    pipeline.main([str(file), "--until", "stage1"])
    python = [sys.executable, "-m", "m3bert"]
    assert [words[:4] for words in started] == [
        [*python, "tokenizer"], [*python, "prepare"], ["torchrun", "--nproc_per_node", "8", "-m"],
    ]  # fmt: skip
    folder = tmp_path / "run"
    assert f"--prepared_data {folder}/rows" in " ".join(started[2])
    assert started[0][-2:] == ["--output_dir", str(folder / "tokenizer")]
    pipeline.main([str(file)])
    assert len(started) == 4 and started[3][3:5] == ["average", "--run"]
    capsys.readouterr()
    pipeline.main([str(file), "--dry_run"])
    assert len(started) == 4 and capsys.readouterr().out.count("finished before") == 4


def test_a_change_of_a_stage_that_ran_is_refused_before_any_work(content, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.subprocess, "run", lambda words: subprocess.CompletedProcess(words, 0))
    file = written(tmp_path, content)
    pipeline.main([str(file)])
    content["stages"]["stage1"]["options"]["learning_rate"] = 2e-2
    with pytest.raises(
        ValueError, match=r"Stage 'stage1' ran before, .* change in: learning_rate\. .* remove .*stage1 and"
    ):
        pipeline.main([str(written(tmp_path, content))])
    content["stages"]["stage1"]["options"]["learning_rate"] = 1e-2
    pipeline.main([str(written(tmp_path, content))])
    (tmp_path / "text" / "en" / "a.txt").write_text("other text")
    with pytest.raises(ValueError, match="Stage 'tokenizer' ran before, .* change in: files"):
        pipeline.main([str(file)])


def test_a_stage_that_fails_ends_the_pipeline(content, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.subprocess, "run", lambda words: subprocess.CompletedProcess(words, 3))
    file = written(tmp_path, content)
    for _ in range(2):  # it is not finished, so that it starts again
        with pytest.raises(ValueError, match="Stage 'tokenizer' failed with exit status 3"):
            pipeline.main([str(file)])


BAD_OPTIONS = {
    "rows": [({"tokenizer_name": "{stage1}"}, r"refers to \{stage1\}, but the stages before it are: tokenizer$")],
    "stage1": [
        ({"prepared_data": "{row}"}, r"refers to \{row\}, but the stages before it are: tokenizer, rows"),
        ({"learning_speed": 1}, "learning_speed"),
        ({"learning_rate": "fast"}, "learning_rate.*fast"),
        ({"config": "nowhere"}, "--config nowhere is neither a recipe nor a file"),
    ],
    "tokenizer": [
        ({"files": ["/nowhere/*.txt"]}, "files: /nowhere/.* does not exist"),
        ({"files": ["$NOWHERE_SET/a.txt"]}, "the environment variable NOWHERE_SET is not set"),
        ({"files": []}, "needs files"),
    ],
    "mean": [
        ({"last": 1}, "--last 1 must be 2 or more"),
        ({"output_dir": "x"}, "output_dir is .*mean: leave it out"),
    ],
}


@pytest.mark.parametrize(
    ("stage", "options", "message"), [(stage, *case) for stage, cases in BAD_OPTIONS.items() for case in cases]
)
def test_bad_options_are_refused_before_any_work(content, tmp_path, stage, options, message):
    content["stages"][stage]["options"].update(options)
    with pytest.raises(ValueError, match=f"pipeline.yaml, stage '{stage}': .*{message}") as error:
        read_pipeline(written(tmp_path, content))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"stage2": {"command": "pretrain"}}, "stage 'stage2': unknown command 'pretrain'; commands: tokenizer, "),
        ({"stage2": {"command": "train magic"}}, "stage 'stage2': 'magic' is not a method"),
        ({"stage2": {"command": "train"}}, "stage 'stage2': train needs a method"),
        ({"stage2": {"command": "average", "option": {}}}, "stage 'stage2': a stage has a command, and may have"),
        ({"stage2": {"command": "average", "options": [1]}}, "stage 'stage2': options must map names to values"),
        ({"a b": {"command": "average"}}, "stage 'a b': a name has letters"),
    ],
)
def test_bad_stages_are_refused_before_any_work(content, tmp_path, stages, message):
    content["stages"].update(stages)
    with pytest.raises(ValueError, match=message):
        pipeline.main([str(written(tmp_path, content))])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": {}}, "has no stages"),
        ({"stage": 1}, "may have launcher and shared; found: output_dir, stages, stage"),
    ],
)
def test_bad_files_are_refused(content, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_pipeline(written(tmp_path, content | change))


def test_what_is_no_yaml_and_no_stage_is_refused(content, tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text("stages: [")
    with pytest.raises(ValueError, match="pipeline.yaml is not YAML"):
        pipeline.main([str(file)])
    with pytest.raises(
        ValueError, match="--until stage9: there is no such stage; stages: tokenizer, rows, stage1, mean"
    ):
        pipeline.main([str(written(tmp_path, content)), "--until", "stage9"])


def test_options_are_words_of_a_command_line():
    options = {
        "config": ["a", "b"],
        "files": ["x y", "z"],
        "bf16": True,
        "sia": {"layers": [2]},
        "learning_rate": 1e-4,
    }
    words = ["--config", "a", "--config", "b", "--files", "x y", "z", "--bf16", "true", "--sia", '{"layers": [2]}']
    assert option_list(options) == [*words, "--learning_rate", "0.0001"]
