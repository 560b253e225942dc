"""The command `manyhands`, also as `python -m manyhands`."""

import os
import sys


def main() -> None:
    """Load the command and run it."""
    open_standard_streams()
    try:
        from manyhands.cli import main as command
    except KeyboardInterrupt:  # while its libraries are loaded
        sys.exit(130)
    command()


def open_standard_streams() -> None:
    """Point those of stdin, stdout and stderr that the parent closed (`<&-`) at /dev/null.

    The next file or socket would get the number of one of them: libuv aborts the process over that, and words meant for
    people would go into a connection.
    """
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode))


if __name__ == "__main__":
    main()
