"""Pipelines: stages from one file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml

from modeling_m3bert import M3BertForMaskedLM
from scripts import pipeline
from scripts.launchers import FOLDER
from scripts.stages import option_list, read_pipeline
from tests.scripts.test_train import model_config
from trainers.core.checkpoints import complete_checkpoints


ROOT = Path(__file__).resolve().parents[2]
STEPS = 8


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


def in_process(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a stage without a process of its own, which would take seconds to start."""
    assert words[:2] == [sys.executable, "-m"]
    import_module(words[2]).main(words[3:])
    return subprocess.CompletedProcess(words, 0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return M3BertForMaskedLM.from_pretrained(folder).state_dict()


def test_a_killed_pipeline_continues_to_the_same_weights(content, tmp_path, monkeypatch, capsys):
    """kill -9 in the middle of a training stage, with all that it started."""
    file = written(tmp_path, content)
    started = pipeline.subprocess.run
    monkeypatch.setattr(pipeline.subprocess, "run", in_process)
    pipeline.main([str(file), "--until", "rows"])
    stage, tokenizer = tmp_path / "run" / "stage1", tmp_path / "run" / "tokenizer" / "tokenizer.json"
    written_at = tokenizer.stat().st_mtime_ns
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.pipeline", str(file)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and len(complete_checkpoints(stage)) < 2:
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert 2 <= len(complete_checkpoints(stage)) < STEPS
    assert not json.loads((tmp_path / "run" / "stage1.json").read_text())["finished"]

    capsys.readouterr()
    pipeline.main([str(file)])
    printed = capsys.readouterr().out
    assert "tokenizer: finished before" in printed and "--resume_from_checkpoint true" in printed
    assert tokenizer.stat().st_mtime_ns == written_at

    pipeline.main([str(written(tmp_path, {**content, "output_dir": str(tmp_path / "undisturbed")}))])
    for name in ("stage1", "mean"):
        disturbed, undisturbed = weights(tmp_path / "run" / name), weights(tmp_path / "undisturbed" / name)
        assert disturbed.keys() == undisturbed.keys()
        assert all(disturbed[key].equal(undisturbed[key]) for key in disturbed), name
    last, averaged = weights(stage), weights(tmp_path / "run" / "mean")
    assert any(not last[key].equal(averaged[key]) for key in last)

    # A stage that runs in a process of its own: the record of `mean` is lost between its end and its record's.
    record = tmp_path / "run" / "mean.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"finished": False}))
    monkeypatch.setattr(pipeline.subprocess, "run", started)
    capsys.readouterr()
    pipeline.main([str(written(tmp_path, content))])
    assert json.loads(record.read_text())["finished"]
    assert capsys.readouterr().out.startswith("tokenizer: finished before\nrows: finished before\nstage1: finished")


def test_stages_run_in_order_and_once(content, tmp_path, monkeypatch, capsys):
    started = []

    def run(words):
        started.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(pipeline.subprocess, "run", run)
    content["launcher"] = "torchrun --nproc_per_node 8 -m"
    file = written(tmp_path, content)
    pipeline.main([str(file), "--until", "stage1"])
    python = [sys.executable, "-m"]
    assert [words[:3] for words in started[:2]] == [[*python, "scripts.tokenizer"], [*python, "scripts.prepare"]]
    assert started[2][:6] == ["torchrun", "--nproc_per_node", "8", "-m", "scripts.train", "multigranular-mlm"]
    folder = tmp_path / "run"
    assert f"--prepared_data {folder}/rows" in " ".join(started[2])
    assert started[0][-2:] == ["--output_dir", str(folder / "tokenizer")]
    pipeline.main([str(file)])
    assert len(started) == 4 and started[3][2:4] == ["scripts.average", "--run"]
    capsys.readouterr()
    pipeline.main([str(file), "--dry_run"])
    assert len(started) == 4 and capsys.readouterr().out.count("finished before") == 4


def test_a_change_of_a_stage_that_ran_is_refused_before_any_work(content, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.subprocess, "run", lambda words: subprocess.CompletedProcess(words, 0))
    file = written(tmp_path, content)
    pipeline.main([str(file)])
    content["stages"]["stage1"]["options"]["learning_rate"] = 2e-2
    run = tmp_path / "run"
    removed = [run / name for name in ("stage1", "stage1.json", "mean", "mean.json")]
    listed = re.escape(f"remove {' '.join(map(str, removed))}")
    with pytest.raises(ValueError, match=rf"Stage 'stage1' ran before, .* change in: learning_rate\. .* {listed}$"):
        pipeline.main([str(written(tmp_path, content))])
    for record in removed[1::2]:
        record.unlink()
    pipeline.main([str(written(tmp_path, content))])  # as the message says

    (run / "stage1.json").unlink()  # but not what was made of it
    with pytest.raises(ValueError, match="Stage 'mean' ran before, .* change in: earlier stages"):
        pipeline.main([str(written(tmp_path, content))])
    pipeline.main([str(written(tmp_path, content)), "--until", "stage1"])
    (tmp_path / "text" / "en" / "a.txt").write_text("other text")
    with pytest.raises(ValueError, match="Stage 'tokenizer' ran before, .* change in: input files"):
        pipeline.main([str(file)])


def test_a_folder_of_another_command_is_not_written_into(content, tmp_path):
    (tmp_path / "run" / "stage1").mkdir(parents=True)
    with pytest.raises(ValueError, match="Stage 'stage1' would write into .*stage1, which exists"):
        pipeline.main([str(written(tmp_path, content))])


def test_a_stage_that_fails_ends_the_pipeline(content, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.subprocess, "run", lambda words: subprocess.CompletedProcess(words, 3))
    file = written(tmp_path, content)
    for _ in range(2):  # it is not finished, so that it starts again
        with pytest.raises(ValueError, match="Stage 'tokenizer' failed with exit status 3"):
            pipeline.main([str(file)])


BAD_OPTIONS = {
    "rows": [({"tokenizer_name": "{stage1}"}, r"refers to \{stage1\}, but the stages before it are: tokenizer\.$")],
    "stage1": [
        ({"prepared_data": "{row}"}, r"refers to \{row\}, but the stages before it are: tokenizer, rows"),
        ({"learning_speed": 1}, "learning_speed"),
        ({"learning_rate": "fast"}, "learning_rate.*fast"),
        ({"config": "nowhere"}, "--config nowhere is neither a recipe nor a file"),
    ],
    "tokenizer": [
        ({"files": ["/nowhere/*.txt"]}, "files: /nowhere/.* does not exist"),
        ({"files": ["$NOWHERE_SET/a.txt"]}, "the environment variable NOWHERE_SET is not set"),
        ({"files": []}, "files: expected at least one argument"),
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


def test_a_language_without_text_is_refused_before_any_work(content, tmp_path):
    (tmp_path / "text" / "de").mkdir()
    with pytest.raises(ValueError, match="stage 'rows': Language 'de' has no text"):
        read_pipeline(written(tmp_path, content))
    (tmp_path / "text" / "de" / "a.txt").write_text("")
    with pytest.raises(ValueError, match="stage 'rows': language 'de' cannot be read: .*de/a.txt has no content"):
        read_pipeline(written(tmp_path, content))


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


def test_files_may_be_urls(content, tmp_path, capsys):
    url = "https://example.org/a.txt"
    content["stages"]["tokenizer"]["options"]["files"] = [url]
    pipeline.main([str(written(tmp_path, content)), "--dry_run", "--until", "tokenizer"])
    assert f"--files {url} --vocab_size 300" in capsys.readouterr().out


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


def test_the_stages_of_m3bert_are_a_legal_pipeline(tmp_path, monkeypatch):
    """With the CPU in place of GPUs, which bfloat16 is refused without."""
    for variable in ("ENGLISH", "LANGUAGES", "PAIRS"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("CLICKS", str(tmp_path / "clicks.jsonl"))
    for file in ("clicks.jsonl", "PAIRS/a.jsonl.gz", "ENGLISH/en/a.txt", "LANGUAGES/de/a.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("a text\n")
    content = yaml.safe_load((FOLDER / "m3bert_pipeline.yaml").read_text())
    for stage in content["stages"].values():
        if stage["command"].startswith("train"):
            stage["options"]["use_cpu"] = True
    stages = read_pipeline(written(tmp_path, content))
    assert [stage.name for stage in stages if stage.launcher[0] == "torchrun"] == [
        "stage1", "distilled", "stage2", "stage3", "finetuned",
    ]  # fmt: skip
    assert {stage.name: stage.after for stage in stages}["stage2"] == ("languages", "distilled")
