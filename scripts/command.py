"""What the commands of this folder share: their help, and how they end when something is wrong: in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A command's docstring as it is written, and every option's default."""


def run_command(main: Callable[[list[str]], None]) -> None:
    """Call a command's `main` with the command line; what the user can mend is printed without a traceback."""
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        said = str(error).strip() or type(error).__name__
        sys.exit(f"error: {said.splitlines()[0]}")  # libraries go on about it for a page
