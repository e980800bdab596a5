"""
Average the weights of checkpoints of one run:

    m3bert average --checkpoints runs/stage1/checkpoint-900 runs/stage1/checkpoint-1000 --output_dir runs/averaged
    m3bert average --run runs/stage1 --last 3 --output_dir runs/averaged
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .command import parse_options, run_command


@dataclass
class AveragingArguments:
    """Which checkpoints."""

    checkpoints: list[str] = field(default_factory=list, metadata={"help": "Folders of the checkpoints."})
    run: str | None = field(default=None, metadata={"help": "In place of --checkpoints: output folder of a run."})
    last: int = field(default=3, metadata={"help": "With --run: the number of checkpoints, counted from the last."})
    output_dir: str = field(default="runs/averaged", metadata={"help": "Folder to write, which must not exist."})


def check(options: AveragingArguments) -> None:
    """
    Check the options.

    Raises:
        ValueError: if they do not name checkpoints in one way.
    """
    if bool(options.checkpoints) == (options.run is not None):
        raise ValueError("Averaging needs --checkpoints FOLDER FOLDER ..., or --run FOLDER.")
    if options.last < 2:
        raise ValueError(f"--last {options.last} must be 2 or more.")


def main(arguments: list[str]) -> None:
    (options,) = parse_options((AveragingArguments,), __doc__, arguments)
    check(options)
    from trainers.core.averaging import average_checkpoints
    from trainers.core.checkpoints import last_checkpoints

    folders = options.checkpoints or last_checkpoints(options.run, options.last)
    average_checkpoints(folders, options.output_dir)
    print(f"{options.output_dir}: the mean of {', '.join(folders)}")


if __name__ == "__main__":
    run_command(main)
