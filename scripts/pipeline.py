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
import subprocess
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from .command import argument_parser, run_command
from .recipes import find_recipe
from .stages import FILES, Stage, read_pipeline


def described(stage: Stage, earlier: Mapping[str, str]) -> dict[str, Any]:
    """
    What the output of a stage depends on.

    Args:
        stage ([`Stage`]): The stage.
        earlier (`dict[str, str]`): Stage before it -> digest of what it depends on.
    """
    configs = _as_list(stage.options.get("config", []))
    earlier_folders = [stage.folder.with_name(name) for name in stage.after]
    named = [Path(path) for option in FILES for path in _as_list(stage.options.get(option, []))]
    files = [path for path in named if not any(path.is_relative_to(folder) for folder in earlier_folders)]
    return {
        "command": list(stage.command),
        "options": dict(stage.options),
        "recipes": [find_recipe(name).read_text(encoding="utf-8") for name in configs],
        "files": {str(path): _file_state(path) for path in files},
        "after": {name: earlier[name] for name in stage.after},
    }


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _file_state(path: Path) -> list[list[Any]]:
    """Name, size and time of change of a file, or of the files in a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def digest_of(description: Mapping[str, Any]) -> str:
    """A digest of a description."""
    return blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16).hexdigest()


def is_finished(stage: Stage, description: Mapping[str, Any]) -> bool:
    """
    Whether a stage is finished.

    Raises:
        ValueError: if it ran, wholly or in part, with something else than now.
    """
    if not stage.record.is_file():
        return False
    record = json.loads(stage.record.read_text(encoding="utf-8"))
    before = record["description"]
    changed = [name for name in description if name != "options" and before.get(name) != description[name]]
    options, old = description["options"], before.get("options", {})
    changed += [name for name in sorted(options.keys() | old.keys()) if options.get(name) != old.get(name)]
    if changed:
        raise ValueError(
            f"Stage {stage.name!r} ran before, and since then there is a change in: {', '.join(changed)}. To run it "
            f"again, remove {stage.folder} and {stage.record}."
        )
    return bool(record["finished"])


def run_stage(stage: Stage, description: Mapping[str, Any]) -> None:
    """
    Run a stage in a process of its own. Training continues from its last complete checkpoint.

    Raises:
        ValueError: if it fails.
    """
    from trainers.core.checkpoints import complete_checkpoints

    words = [*stage.launcher, "m3bert", *stage.arguments]
    if stage.command[0] == "train" and complete_checkpoints(stage.folder):
        words += ["--resume_from_checkpoint", "true"]
    _write(stage, description, finished=False)
    print(f"{stage.name}: {shlex.join(words)}", flush=True)
    begun = time.monotonic()
    code = subprocess.run(words).returncode
    if code != 0:
        raise ValueError(f"Stage {stage.name!r} failed with exit status {code}; its last lines say why.")
    _write(stage, description, finished=True, seconds=round(time.monotonic() - begun, 1))


def _write(stage: Stage, description: Mapping[str, Any], *, finished: bool, seconds: float = 0.0) -> None:
    """Write the record of a stage. The seconds of interrupted runs add up."""
    spent = json.loads(stage.record.read_text(encoding="utf-8"))["seconds"] if stage.record.is_file() else 0.0
    stage.record.parent.mkdir(parents=True, exist_ok=True)
    unfinished = stage.record.with_suffix(".unfinished")
    content = {"finished": finished, "seconds": spent + seconds, "description": dict(description)}
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(stage.record)


def run_pipeline(stages: list[Stage], *, dry_run: bool = False) -> None:
    """
    Run the stages that are not finished.

    Args:
        stages (`list[Stage]`): Of [`read_pipeline`].
        dry_run (`bool`, *optional*, defaults to `False`): Print the commands only.

    Raises:
        ValueError: if a stage fails, or ran before with something else.
    """
    digests: dict[str, str] = {}
    planned = []
    for stage in stages:  # all of them before any work
        description = described(stage, digests)
        digests[stage.name] = digest_of(description)
        planned.append((stage, description, is_finished(stage, description)))
    for stage, description, finished in planned:
        if finished:
            print(f"{stage.name}: finished before", flush=True)
        elif dry_run:
            print(f"{stage.name}: {shlex.join([*stage.launcher, 'm3bert', *stage.arguments])}")
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
