"""How every command of this folder ends when something is wrong: in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run_command(main: Callable[[list[str]], None]) -> None:
    """Call a command's `main` with the command line; what the user can mend is printed without a traceback."""
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
