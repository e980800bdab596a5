"""`python -m scripts.launchers`."""

from ..command import run_command
from . import main


if __name__ == "__main__":
    run_command(main)
