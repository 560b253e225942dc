"""The command `manyhands`, also as `python -m manyhands`."""

import sys


def main() -> None:
    """Load the command and run it."""
    try:
        from manyhands.cli import main as command
    except KeyboardInterrupt:  # while its libraries are loaded
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
