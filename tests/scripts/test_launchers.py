"""The launcher files: what each one starts, with launchers that only write down how they were called."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from scripts import train
from scripts.launchers import FOLDER, copy_launchers, launcher_files, main
from tests.snippets import ROOT, read


SCRIPTS = [file.name for file in launcher_files() if file.suffix == ".sh"]
ENVIRONMENT = {
    "NODES": "4", "GPUS": "3", "NODE": "1", "FIRST_NODE": "node-0", "OUTPUT": "runs/out", "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "node-[0-3]", "SLURM_JOB_ID": "17", "SLURM_GPUS_ON_NODE": "3",
}  # fmt: skip
# Writes down its own name and arguments; `scontrol` names the nodes instead, and `srun` runs the rest of its line.
STUB = """#!/usr/bin/env bash
case "$(basename "$0")" in
    scontrol) echo node-0; echo node-1 ;;
    srun) shift 2; exec "$@" ;;
    *) printf '%s\\0' "$(basename "$0")" "$@" > "$CALLED" ;;
esac
"""


def started(folder: Path, name: str, *options: str, **changes: str) -> list[str]:
    """The command that a launcher ends in."""
    for stub in ("m3bert", "torchrun", "accelerate", "srun", "scontrol"):
        (folder / stub).write_text(STUB)
        (folder / stub).chmod(0o755)
    environment = ENVIRONMENT | changes | {"PATH": f"{folder}:{os.environ['PATH']}", "CALLED": str(folder / "called")}
    done = subprocess.run(
        ["bash", FOLDER / name, *options], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return (folder / "called").read_text().split("\0")[:-1]


def options_of(command: list[str]) -> list[str]:
    """Method and options of `m3bert train`."""
    assert command[0] == "m3bert" or command[command.index("-m") + 1] == "m3bert"
    start = command.index("train") + 1
    assert command[start - 2] == "m3bert"
    return command[start:]


def example_of(name: str) -> list[str]:
    """The arguments that a launcher's first lines show."""
    lines = [line.removeprefix("#   ") for line in (FOLDER / name).read_text().splitlines() if line.startswith("#   ")]
    words = shlex.split(" ".join(line.strip().rstrip("\\") for line in lines))
    return words[words.index(name) + 1 :]


def test_there_is_one_launcher_per_engine():
    assert SCRIPTS == ["ddp.sh", "fsdp2.sh", "nodes_accelerate.sh", "nodes_torchrun.sh", "one_gpu.sh", "slurm.sh"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_launcher_is_a_shell_script_whose_example_parses(tmp_path, name):
    assert subprocess.run(["bash", "-n", FOLDER / name], capture_output=True, text=True).stderr == ""
    given = example_of(name)
    method, *options = options_of(started(tmp_path, name, *given))
    assert [method, *options][: len(given)] == given
    options += ["--use_cpu", "--bf16", "false"]
    _, data, args = train.parse(train.method_of(method)[0], options)
    assert args.output_dir.startswith("runs/") and (data.train_files or data.prepared_data)
    assert args.fully_shard == bool(args.activation_checkpointing) == (name == "fsdp2.sh")
    with pytest.raises(ValueError, match="unknown options|not used by"):
        train.parse(train.method_of(method)[0], [*options, "--no_such_option", "1"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_arguments_with_spaces_arrive_whole(tmp_path, name):
    mapping = "{name_or_path: a b}"
    assert mapping in started(tmp_path, name, "contrastive", "--guide", mapping)


@pytest.mark.parametrize(
    ("name", "nodes", "processes", "endpoint"),
    [
        ("ddp.sh", "1:1", "3", ""),
        ("fsdp2.sh", "1:1", "3", ""),
        ("nodes_torchrun.sh", "4", "3", "node-0:29500"),
        ("slurm.sh", "4", "3", "node-0:29500"),
    ],
)
def test_torchrun_gets_its_options(tmp_path, name, nodes, processes, endpoint):
    called, *arguments = started(tmp_path, name, "simcse")
    found = get_args_parser().parse_args(arguments)
    assert called == "torchrun" and found.module and found.training_script == "m3bert"
    assert (found.nnodes, found.nproc_per_node, found.rdzv_endpoint) == (nodes, processes, endpoint)
    assert found.standalone == (nodes == "1:1") and (found.standalone or found.rdzv_backend == "c10d")


def test_accelerate_gets_its_options_and_reads_its_file(tmp_path):
    _, launch, *arguments = started(tmp_path, "nodes_accelerate.sh", "simcse")
    found = launch_command_parser().parse_args(arguments)
    assert launch == "launch" and found.module and found.training_script == "m3bert"
    assert (found.machine_rank, found.main_process_ip, found.main_process_port) == (1, "node-0", 29500)
    config = load_config_from_file(found.config_file)
    assert (config.num_machines, config.num_processes, config.distributed_type.value) == (2, 16, "MULTI_GPU")


@pytest.mark.parametrize(("name", "missing"), [("nodes_torchrun.sh", "FIRST_NODE"), ("slurm.sh", "OUTPUT")])
def test_what_a_launcher_needs_is_named(tmp_path, name, missing):
    with pytest.raises(AssertionError, match=missing):
        started(tmp_path, name, "simcse", **{missing: ""})


def test_a_job_goes_on_after_its_checkpoint(tmp_path):
    first = options_of(started(tmp_path, "slurm.sh", "simcse"))
    (tmp_path / "runs" / "out" / "checkpoint-20").mkdir(parents=True)
    second = options_of(started(tmp_path, "slurm.sh", "simcse"))
    assert first == ["simcse", "--output_dir", "runs/out", "--resume_from_checkpoint", "false"]
    assert second == [*first[:-1], "true"]


def test_the_command_lists_and_copies(tmp_path, capsys):
    main([])
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [file.name for file in launcher_files()]
    assert "The GPUs of one node, with the whole model on each (DDP)" in listed[0]
    main([str(tmp_path / "launch")])
    assert {file.name for file in (tmp_path / "launch").iterdir()} == {file.name for file in launcher_files()}
    copy_launchers(tmp_path / "launch")
    (tmp_path / "launch" / "ddp.sh").write_text("mine")
    with pytest.raises(ValueError, match=r"ddp\.sh exists and was changed"):
        copy_launchers(tmp_path / "launch")


def test_the_page_names_every_launcher():
    assert set(re.findall(r"`(\w+\.sh)`", read("docs/scale.md"))) == set(SCRIPTS)


@pytest.mark.slow
def test_a_launcher_trains_in_two_processes(tmp_path, tiny_checkpoint, sentences):
    (tmp_path / "texts.txt").write_text("\n".join(sentences))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "GPUS": "2", "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = [
        "--config",
        "unsupervised_simcse",
        "--model_name_or_path",
        tiny_checkpoint,
        "--train_files",
        "texts.txt",
    ]
    options += ["--output_dir", "out", "--use_cpu", "true", "--max_steps", "2", "--report_throughput", "true"]
    options += [
        "--per_device_train_batch_size",
        "8",
        "--logging_steps",
        "1",
        "--model_config",
        "{hidden_dropout: 0.1}",
    ]
    command = ["bash", FOLDER / "ddp.sh", "simcse", *options, "--save_strategy", "steps"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["log_history"][0]["tokens_per_second"] > 0
