"""`python -m m3bert COMMAND`, for launchers (`torchrun -m m3bert train ...`) and where `m3bert` is not on the path."""

from .cli import main


if __name__ == "__main__":
    main()
