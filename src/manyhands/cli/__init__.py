"""The command `manyhands`: one file a command, heavy imports inside the commands so that help is instant.

    up       start or resume a swarm     join     become a member of one    status           who is there
    local    a swarm on this machine     serve    host layers               infer, chat      ask a swarm
    plan     what to expect              model    inspect, split, tiny      ticket           new, add, show
    workers  the nodes of a gateway      jobs     what it did               benchmark, key   how fast, and who may use it
    pull, list, rm, show   the models of this machine
    page     its page in a browser       code     the code by which a machine joins
    stop     let a node leave            logs     what one in the background says
    service  a node that systemd runs
    config   what is set, and where      doctor   is this machine fit
    demo     see it work

Exit codes: 0 fine, 1 an error while running, 2 bad input or usage, 130 interrupted.
"""

import os
import sys
from typing import NoReturn

import typer

from manyhands import __version__
from manyhands.cli.commands import LazyGroup
from manyhands.cli.lines import error_line
from manyhands.cli.process import forgive_streams, hide_secrets, log_plainly
from manyhands.cli.values import HELP
from manyhands.errors import ManyhandsError
from manyhands.files import this_folder
from manyhands.refusals import limit_reached, refused

app = typer.Typer(
    cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=True, rich_markup_mode=None
)
# They tell what is wrong with the configuration; every other command ends with that.
READ_IT_THEMSELVES = ("config", "doctor")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"manyhands {__version__}")
        raise typer.Exit


@app.callback(context_settings={"help_option_names": HELP})
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Run a language model over several machines; begin with `manyhands up MODEL` or `manyhands demo`."""
    from manyhands.cli import configured, options

    if os.environ.get("NO_COLOR"):  # rich looks itself
        context.color = False
    this_folder()  # libraries end the process where it is gone
    if context.invoked_subcommand not in READ_IT_THEMSELVES:
        context.obj = options.settings()
        context.default_map = configured.defaults(context.obj)


def main() -> None:
    """Entry point. Every expected error is one line on stderr and an exit code."""
    hide_secrets()
    forgive_streams()
    log_plainly()
    # numpy would start a thread for each core, which spins for a while, for products that the engine computes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ManyhandsError as error:
        _end(str(error), error, 2 if error.http_status < 500 else 1)
    except (OSError, MemoryError, RuntimeError, ImportError, BaseExceptionGroup) as error:
        if (line := refused(error)) is None:
            raise
        _end(line, error, 1)


def _end(line: str, error: BaseException, code: int) -> NoReturn:
    """Say what went wrong, and end."""
    print(error_line(line, sys.stderr), file=sys.stderr)
    if limit_reached(error) is not None:
        # What is still open may not be closed without what there was too little of, and would be complained of.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
