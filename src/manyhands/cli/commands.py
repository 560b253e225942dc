"""The table of commands, each loaded when it is called: what `manyhands --help` prints needs none of them."""

import builtins
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

from manyhands.cli.process import uncollected
from manyhands.cli.sections import SectionedCommand
from manyhands.cli.values import read_plainly

# Name -> what it does, in the order of the help. The module of the same name (or of MODULES) defines a function of that
# name, `list_` for what Python has already, or `app`.
COMMANDS: Final = {
    "up": "Start a swarm for a model, or come back to it, and answer requests.",
    "join": "Join a swarm and serve the layers that help it most.",
    "page": "Print a link to the page that signs this machine's owner in.",
    "code": "Show the code by which a machine of this network joins.",
    "status": "Who is in the swarm, which layers they hold, how busy they are.",
    "local": "Run a model cut over several node processes on this machine.",
    "serve": "Host layers of a model for those who hold the ticket.",
    "infer": "Ask a model to go on from a prompt: of a gateway or a swarm.",
    "chat": "Talk with a model of a gateway or a swarm.",
    "pull": "Fetch a model to this machine: a short name, a hub id.",
    "list": "The models of this machine, and who in the swarm has which layers.",
    "show": "What a model is, how large, and where it lies.",
    "rm": "Remove a model from this machine.",
    "plan": "Find the best placement of a model on machines, and its speed.",
    "jobs": "Requests that run and that ran lately: timings, route, repairs.",
    "benchmark": "Ask a gateway the same prompts and say how fast it answers.",
    "switch": "Make a running member inert, or active again.",
    "stop": "Let a node on this machine hand its sessions over and leave.",
    "logs": "What a node in the background (up, join or serve -d) has said.",
    "service": "Run a node as a service of systemd, for this user.",
    "demo": "Ask three processes a question and kill one in the middle.",
    "config": "Print the configuration in force, and where each value is set.",
    "doctor": "Check keys, ports, reachability, disk, memory and the engine.",
    "model": "Look into a model, cut it into parts, make a tiny one.",
    "ticket": "Make and read the text that lets machines join a swarm.",
    "workers": "Every node that a running gateway sees, and its routes.",
    "key": "Who may use the gateway: make, list and revoke API keys.",
}
MODULES: Final = dict.fromkeys(("pull", "list", "show", "rm"), "shelf")


def _nothing() -> None:
    pass


class LazyCommands(Mapping[str, Any]):
    """Name -> command, which is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        """Raises KeyError for what is no command."""
        COMMANDS[name]
        with uncollected():
            module = import_module(f"manyhands.cli.{MODULES.get(name, name)}")
        parent = typer.Typer(add_completion=False, rich_markup_mode=None)
        parent.callback()(_nothing)  # so that it is a group even with one command
        if hasattr(module, "app"):
            for each in module.app.registered_commands:
                each.cls = SectionedCommand
            parent.add_typer(module.app, name=name)
        else:
            parent.command(name, cls=SectionedCommand)(getattr(module, f"{name}_" if hasattr(builtins, name) else name))
        group = typer.main.get_command(parent)
        assert isinstance(group, TyperGroup)
        return _guarded(group.commands[name])

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _guarded(command: Any) -> Any:
    """`command`, of which what the folder's file says is checked (folder_file.py)."""
    from manyhands.cli.folder_file import guard

    for each in with_subcommands(command):
        read_plainly(each)
        guard(each)
    return command


def with_subcommands(command: Any) -> Iterator[Any]:
    """A command of click's and those below it."""
    yield command
    for sub in getattr(command, "commands", {}).values():
        yield from with_subcommands(sub)


class LazyGroup(TyperGroup):
    """A group over `COMMANDS`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LazyCommands()  # type: ignore[assignment]  # commands are not added to it

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        read_plainly(self)  # now that --install-completion is among the options
        return super().make_context(*arguments, **options)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
