"""
Run stages one after the other, each with the results of those before it:

    m3bert pipeline pretrain.yaml --dry_run     # check the file, and print the commands
    m3bert pipeline pretrain.yaml               # run; finished stages are skipped
    m3bert pipeline pretrain.yaml --until stage1

The file names the stages in their order. A stage is a command of m3bert with its options:

    output_dir: runs/pretraining
    launcher: torchrun --nproc_per_node 8 -m     # optional: starts the commands that train
    shared: {...}                                # optional: not read; a place for YAML anchors
    stages:
      tokenizer: {command: tokenizer, options: {files: [data/en/a.txt]}}
      rows: {command: prepare, options: {files: [data], tokenizer_name: "{tokenizer}"}}
      stage1:
        command: train multigranular-mlm
        options: {config: m3bert_stage1, prepared_data: "{rows}", tokenizer_name: "{tokenizer}"}

`{tokenizer}` is the output folder of that stage, OUTPUT_DIR/tokenizer; `$NAME` is an environment variable, and `*` in
the path of a file stands for any text. Everything is checked before the first stage starts. Run the command again
after an interruption: training continues from its last checkpoint.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from .command import argument_parser, run_command
from .recipes import find_recipe
from .stages import Stage, as_list, read_pipeline


def described(stage: Stage, earlier: Mapping[str, str]) -> dict[str, Any]:
    """
    What the output of a stage depends on. Files count by name, size and time of change, as for `make`.

    Args:
        stage ([`Stage`]): The stage.
        earlier (`dict[str, str]`): Stage before it -> digest of what it depends on.
    """
    earlier_folders = [stage.folder.with_name(name) for name in stage.after]
    files = [
        (option, path)
        for option, path in stage.inputs
        if not any(path.is_relative_to(folder) for folder in earlier_folders)
    ]
    recipes = [find_recipe(name).read_text(encoding="utf-8") for name in as_list(stage.options.get("config", []))]
    return {
        "command": list(stage.command),
        "options": dict(stage.options),
        "recipes": digest_of(recipes),
        "input files": digest_of([[option, str(path), file_state(path)] for option, path in files]),
        "earlier stages": {name: earlier[name] for name in stage.after},
    }


def file_state(path: Path) -> list[list[Any]]:
    """Name, size and time of change of a file, or of the files in a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def digest_of(content: Any) -> str:
    """A digest of what JSON can write."""
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def record_of(stage: Stage) -> dict[str, Any] | None:
    """
    The record of a stage that began; `None` if it did not.

    Raises:
        ValueError: if its folder has files but no record, so that another command wrote them.
    """
    if stage.record.is_file():
        return json.loads(stage.record.read_text(encoding="utf-8"))
    if stage.folder.exists():
        raise ValueError(
            f"Stage {stage.name!r} would write into {stage.folder}, which exists and is of another command: remove "
            "it, or choose another output_dir."
        )
    return None


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two results of [`described`]: parts, and names of options."""
    options, old = now["options"], before["options"]
    changed = [name for name in now if name != "options" and before[name] != now[name]]
    return changed + [name for name in sorted(options.keys() | old.keys()) if options.get(name) != old.get(name)]


def planned(stages: Sequence[Stage]) -> list[tuple[Stage, dict[str, Any], bool]]:
    """
    Each stage with what it depends on, and whether it is finished.

    Raises:
        ValueError: if a stage ran, wholly or in part, with something else than now. The message names it, and what
            to remove to run it and those after it again.
    """
    digests: dict[str, str] = {}
    plan: list[tuple[Stage, dict[str, Any], bool]] = []
    unfinished: set[str] = set()
    different: list[tuple[Stage, list[str]]] = []
    for stage in stages:
        description = described(stage, digests)
        digests[stage.name] = digest_of(description)
        record = record_of(stage)
        finished = record is not None and record["finished"]
        if record is not None:
            changed = changes(record["description"], description)
            if not changed and unfinished & set(stage.after):
                changed = ["earlier stages"]  # removed or interrupted since then
            if changed:
                different.append((stage, changed))
        if not finished:
            unfinished.add(stage.name)
        plan.append((stage, description, finished))
    if different:
        first, changed = different[0]
        paths = [str(path) for stage, _ in different for path in (stage.folder, stage.record)]
        raise ValueError(
            f"Stage {first.name!r} ran before, and since then there is a change in: {', '.join(changed)}. To run it "
            f"again, with the stages that read its output, remove {' '.join(paths)}"
        )
    return plan


def run_stage(stage: Stage, description: Mapping[str, Any]) -> None:
    """
    Run a stage in a process of its own. Training continues from its last complete checkpoint.

    Raises:
        ValueError: if it fails.
    """
    from trainers.core.checkpoints import complete_checkpoints

    record = record_of(stage)
    spent = 0.0 if record is None else record["seconds"]
    words = stage.words
    if stage.command[0] == "train" and complete_checkpoints(stage.folder):
        words += ["--resume_from_checkpoint", "true"]
    elif stage.command[0] == "average":  # it writes all or nothing, and only into a new folder
        shutil.rmtree(stage.folder, ignore_errors=True)
    write_record(stage, description, finished=False, seconds=spent)
    print(f"{stage.name}: {shlex.join(words)}", flush=True)
    begun = time.monotonic()
    code = subprocess.run(words).returncode
    write_record(stage, description, finished=code == 0, seconds=round(spent + time.monotonic() - begun, 1))
    if code != 0:
        raise ValueError(f"Stage {stage.name!r} failed with exit status {code}; its last lines say why.")


def write_record(stage: Stage, description: Mapping[str, Any], *, finished: bool, seconds: float) -> None:
    """Write the record of a stage. Its seconds are those of all runs that were not killed."""
    stage.record.parent.mkdir(parents=True, exist_ok=True)
    unfinished = stage.record.with_suffix(".unfinished")
    content = {"finished": finished, "seconds": seconds, "description": dict(description)}
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(stage.record)


def run_pipeline(stages: Sequence[Stage], *, dry_run: bool = False) -> None:
    """
    Run the stages that are not finished.

    Args:
        stages (`Sequence[Stage]`): Of [`read_pipeline`].
        dry_run (`bool`, *optional*, defaults to `False`): Print the commands only.

    Raises:
        ValueError: if a stage fails, or ran before with something else.
    """
    for stage, description, finished in planned(stages):
        if finished:
            print(f"{stage.name}: finished before", flush=True)
        elif dry_run:
            print(f"{stage.name}: {shlex.join(stage.words)}")
        else:
            run_stage(stage, description)


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("file", type=Path, help="the pipeline, a YAML file")
    parser.add_argument("--dry_run", action="store_true", help="check the file, print the commands, and run nothing")
    parser.add_argument("--until", help="stop after this stage")
    options = parser.parse_args(arguments)
    stages = read_pipeline(options.file)
    names = [stage.name for stage in stages]
    if options.until is not None:
        if options.until not in names:
            raise ValueError(f"--until {options.until}: there is no such stage; stages: {', '.join(names)}.")
        stages = stages[: names.index(options.until) + 1]
    run_pipeline(stages, dry_run=options.dry_run)


if __name__ == "__main__":
    run_command(main)
