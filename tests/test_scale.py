"""The launcher lines of docs/scale.md, as far as two CPU processes go, and what happens when a process dies."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.run import get_args_parser

from m3bert.commands import train
from m3bert.modeling import M3BertModel
from m3bert.trainers import ContrastiveConfig
from m3bert.trainers.core.checkpoints import last_checkpoint
from tests.browser import free_port
from tests.conftest import save, tiny_config
from tests.snippets import ROOT, read, snippets


# In blocks that tests/test_docs.py leaves alone.
LINES = {
    re.search(r"--output_dir runs/(\S+)", snippet.code)[1]: snippet.code
    for snippet in snippets(read("docs/scale.md"))
    if snippet.language == "sh" and not snippet.code.startswith("#!")
}
MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli", "m3bert": "m3bert"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer, sentences) -> Path:
    """A model and data by the names of the page."""
    folder = tmp_path_factory.mktemp("scale")
    model = folder / "runs" / "m3bert-from-me5"
    tiny_config_of_page = tiny_config(matryoshka_layers=[2, 6], embedding_dropout=0.0, attention_dropout=0.0)
    save(model, M3BertModel(tiny_config_of_page), tiny_tokenizer)
    rows = [f"{a},{b}" for a, b in zip(sentences, sentences[::-1], strict=True)]
    (folder / "triplets.csv").write_text("\n".join(["anchor,positive", *rows]) + "\n")
    return folder


def commands(line: str) -> list[list[str]]:
    """
    A line of the page as one command per node: with eight processes per node made two in all, the tiny model's grid,
    and a short run on the CPU.
    """
    words = shlex.split(line.replace("\\\n", " "))
    nodes = 2 if "first-node" in line else 1
    port, changed = free_port(), []
    for node in range(nodes):
        own = list(words)
        for option, value in (
            ("--nproc_per_node", "1" if nodes == 2 else "2"),
            ("--num_processes", "1" if "--num_processes 1 " in line else "2"),
            ("--machine_rank", str(node)),
            ("--main_process_ip", "localhost"),
            ("--main_process_port", str(port)),
            ("--rdzv_endpoint", f"localhost:{port}"),
            ("--grid", "2,6x8,32"),
        ):
            if option in own:
                own[own.index(option) + 1] = value
        if own[0] == "torchrun" and nodes == 1:
            own[1:1] = ["--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
        if own[0] == "accelerate" and nodes == 1:
            own[2:2] = ["--main_process_port", str(port)]
        whole = "two" not in line and "--nproc_per_node" not in line and "--num_processes 8" not in line
        own += ["--use_cpu", "true", "--max_steps", "3", "--logging_steps", "1", "--report_to", "none", "--seed", "3"]
        own += ["--per_device_train_batch_size", "8" if whole else "4", "--train_sampling_strategy", "sequential"]
        changed.append([sys.executable, "-m", MODULES[own[0]], *own[1:]])
    return changed


def run(folder: Path, line: str) -> list[float]:
    """The losses of a line's run."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["TMPDIR"] = str(folder)  # where torchrun keeps its logs
    started = [
        subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command in commands(line)
    ]
    printed = [process.communicate(timeout=280)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0] * len(started), printed[0][-3000:]
    output = folder / re.search(r"--output_dir (\S+)", line)[1]
    assert (output / "model.safetensors").is_file()
    state = json.loads((output / "checkpoint-3" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def test_the_page_has_a_line_of_each_launcher_for_each_way():
    assert list(LINES) == [
        f"{way}{launcher}" for way in ("one-gpu", "ddp", "fsdp2", "two-nodes") for launcher in ("", "-accelerate")
    ]
    starts = [line.split()[0] for line in LINES.values()]
    assert starts == ["m3bert", "accelerate", *["torchrun", "accelerate"] * 3]


# Writes down its own name and arguments; `scontrol` names the nodes instead, and `srun` runs the rest of its line.
STUB = """#!/usr/bin/env bash
case "$(basename "$0")" in
    scontrol) echo node-0; echo node-1 ;;
    srun) shift 2; exec "$@" ;;
    *) printf '%s\\0' "$@" > called ;;
esac
"""


def test_the_slurm_script_starts_torchrun_with_options_that_it_and_the_command_know(tmp_path):
    (script,) = (snippet.code for snippet in snippets(read("docs/scale.md")) if snippet.code.startswith("#!"))
    for stub in ("torchrun", "srun", "scontrol"):
        (tmp_path / stub).write_text(STUB)
        (tmp_path / stub).chmod(0o755)
    (tmp_path / "slurm.sh").write_text(script)
    job = {"NNODES": "2", "JOB_NODELIST": "node-[0-1]", "JOB_ID": "17", "GPUS_ON_NODE": "8"}
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "slurm.sh"], cwd=tmp_path, env=environment, check=True)
    found = get_args_parser().parse_args((tmp_path / "called").read_text().split("\0")[:-1])
    assert (found.nnodes, found.nproc_per_node, found.rdzv_endpoint) == ("2", "8", "node-0:29500")
    assert found.module and found.training_script == "m3bert"
    command, method, *options = found.training_script_args
    _, data, args = train.parse(train.method_of(method)[0], [*options, "--use_cpu", "true", "--bf16", "false"])
    assert command == "train" and args.resume_from_checkpoint == "auto" and data.train_files == ["triplets.csv"]


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-accelerate"])
def test_a_line_that_shards_is_understood(name):
    words = shlex.split(LINES[name].replace("\\\n", " "))
    options = words[words.index("contrastive") + 1 :]
    _, _, args = train.parse(ContrastiveConfig, [*options, "--use_cpu"])
    assert args.fsdp is True and args.fsdp_plugin_args["fsdp_version"] == 2


@pytest.mark.slow
def test_every_line_trains_with_the_same_losses(folder):
    """One process with all rows, two processes, and two launchers."""
    losses = {name: run(folder, line) for name, line in LINES.items() if "fsdp" not in name}
    for name, found in losses.items():
        assert found == pytest.approx(losses["one-gpu"], abs=2e-2, rel=1e-2), name  # bfloat16
    assert len(losses["one-gpu"]) == 3


@pytest.mark.slow
def test_a_dead_process_ends_the_run_which_can_continue(folder):
    line = LINES["ddp"].replace("runs/ddp", "runs/dead")
    (command,) = commands(line)
    command += ["--save_steps", "1", "--max_steps", "100000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["TMPDIR"] = str(folder)  # where torchrun keeps its logs
    output = folder / "runs" / "dead"
    launcher = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 200
    while not (output / "checkpoint-2" / "trainer_state.json").is_file():
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.stderr.read().decode()[-3000:]
        time.sleep(0.2)
    workers = [child for child in psutil.Process(launcher.pid).children() if "m3bert" in " ".join(child.cmdline())]
    assert len(workers) == 2
    os.kill(workers[1].pid, signal.SIGKILL)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert "SIGKILL" in errors.decode()
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    last = int(last_checkpoint(output).rpartition("-")[2])
    command[-1] = str(last + 2)
    subprocess.run(
        [*command, "--resume_from_checkpoint", "true"], cwd=folder, env=environment, check=True, capture_output=True
    )
    assert (output / f"checkpoint-{last + 2}").is_dir()
