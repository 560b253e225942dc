"""`manyhands plan`: what to expect of a set of machines, before anything is loaded."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli import options
from manyhands.cli.client import ApiKey, running_api
from manyhands.cli.lines import fitted
from manyhands.cli.plan_swarm import plan_swarm
from manyhands.cli.progress import doing
from manyhands.errors import BadRequest
from manyhands.plain import figure_of, size_of

if TYPE_CHECKING:
    from manyhands.core import Precision
    from manyhands.place.kernels import Predicted
    from manyhands.place.machines import Fleet, Machine
    from manyhands.place.plan import PlacementPlan, Plans, Task
    from manyhands.place.shape import Checkpoint

DEFAULT_TOKENS, DEFAULT_PROMPT = 2048, 128
STRATEGIES = ("measured", "uniform", "capacity")

Swarm = Annotated[bool, typer.Option("--swarm", help="Of the swarm that runs, with what its nodes have measured.")]
Apply = Annotated[bool, typer.Option("--apply", help="Ask the nodes of the swarm to serve the plan.")]
Force = Annotated[bool, typer.Option("--force", help="With --apply: also where little is gained, or a node is needed.")]
Machines = Annotated[
    Path | None, typer.Option("--machines", help="TOML file of machines; default: this one, measured.")
]
Memory = Annotated[str, typer.Option("--memory", help="What this machine may give, as in 6GB; default: what is free.")]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", min=1, help="Tokens to hold cache for, prompt included; default: 2048, or the context."),
]
PromptTokens = Annotated[
    int | None,
    typer.Option("--prompt", min=1, help="Tokens of the prompt, for the time to the first token; default: 128."),
]
Gateway = Annotated[
    str, typer.Option("--api", envvar="MANYHANDS_API", help="The gateway to ask; default: of a node that runs here.")
]


def plan(
    context: typer.Context,
    model: options.Model,
    machines: Machines = None,
    add: Annotated[
        list[str] | None, typer.Option("--add", help='What if there were also "laptop:8GB@40ms"; may be repeated.')
    ] = None,
    memory: Memory = "",
    tokens: Tokens = None,
    prompt: PromptTokens = None,
    strategy: Annotated[str, typer.Option("--strategy", help="measured, uniform or capacity.")] = "measured",
    dtype: options.DType = "auto",
    cache_dtype: options.CacheDType = "auto",
    swarm: Swarm = False,
    apply: Apply = False,
    force: Force = False,
    api: Gateway = "",
    api_key: ApiKey = "",
    as_json: options.Json = False,
) -> None:
    """Find the best placement of a model on machines and say what to expect of it, before loading."""
    if strategy not in STRATEGIES:
        raise BadRequest(f"--strategy is {strategy!r}; it is one of {', '.join(STRATEGIES)}")
    if force and not apply:
        raise BadRequest("--force goes with --apply: without it nothing is asked of any node")
    if (swarm or apply or machines) and not options.is_given(context, "memory"):
        memory = ""  # what the configuration says is of this machine alone
    if swarm or apply:
        if machines or memory or tokens or prompt or (apply and add):
            raise BadRequest("--swarm and --apply plan for the machines that there are: leave the others' options out")
        body = {"model": model, "strategy": strategy, "add": add or [], "apply": apply, "force": force}
        return plan_swarm(api or running_api(), api_key, body, as_json=as_json)
    with doing(f"planning {model}"):
        from manyhands.config import home_from_env
        from manyhands.place.plan import Plans, Task, advice, find_plans, place
        from manyhands.place.shape import look_up
        from manyhands.place.whatif import what_if

        given = _checked(memory, add or [])
        checkpoint = look_up(model, options.precision_of(dtype, model, cache_dtype), home_from_env())
        fleet = _fleet(checkpoint, machines, given)
        length = tokens or min(DEFAULT_TOKENS, checkpoint.shape.context)
        task = Task(checkpoint.shape, fleet, length, prompt or min(DEFAULT_PROMPT, length))
        wider = replace(task, fleet=fleet.with_machines(_added(add or [], fleet))) if add else task
        plans = find_plans(wider)
        if strategy != "measured":
            plans = Plans((place(wider, strategy),), plans.alone, None)  # type: ignore[arg-type]
        said = [advice(plans)]
        if add:
            said.append(what_if(find_plans(task), plans, {m.name for m in wider.fleet.machines[len(fleet.machines) :]}))
        precisions = _precisions(checkpoint, task) if machines is None else {}
    if as_json:
        told = {**_as_object(wider, plans, said), "precisions": [asdict(each) for each in precisions.values()]}
        typer.echo(json.dumps(told, allow_nan=False))
    else:
        _show(wider, plans, said, checkpoint, precisions)
    if not plans.ranked:  # no placement has room
        raise typer.Exit(1)


def _checked(memory: str, add: list[str]) -> int | None:
    """The bytes of --memory, if given. Raises BadRequest for what is wrong in it or in --add, before a machine is measured."""
    from manyhands.place.machines import Machine, parse_bytes, parse_what_if

    for text in add:
        parse_what_if(text, Machine("here", 1, 1.0))
    return parse_bytes(memory) if memory else None


def _fleet(checkpoint: "Checkpoint", file: Path | None, memory_bytes: int | None) -> "Fleet":
    """The machines of the file, or this one. This one is measured only where its speed is needed."""
    from manyhands.place.machines import Fleet, fleet_of, needs_measuring, read_machines_file

    if file is None:
        here = _measured(checkpoint, memory_bytes)
        return Fleet((here,), here.name)
    if memory_bytes is not None:
        raise BadRequest("--memory is of this machine; with --machines, memory stands in the file")
    content = read_machines_file(file)
    needed = needs_measuring(content["machine"])
    return fleet_of(content, _measured(checkpoint, None) if needed else None)


def _measured(checkpoint: "Checkpoint", memory_bytes: int | None) -> "Machine":
    """This machine; measured on a thread of its own, which torch's settings then belong to, and which Ctrl-C need not await."""
    import socket

    from manyhands.aside import aside
    from manyhands.cli import rehearsal
    from manyhands.config import home_from_env
    from manyhands.place.measure import this_machine

    name = options.settings().node.name or socket.gethostname() or "here"
    home = home_from_env()
    return options.run(aside(this_machine, name, checkpoint, home, memory_bytes, rehearsal.rehearsed))


def _precisions(checkpoint: "Checkpoint", task: "Task") -> "dict[Precision, Predicted]":
    """What the model would take of this machine's time at each precision. `task`: for this machine alone."""
    from manyhands.checkpoint.config_fields import parse_config
    from manyhands.config import home_from_env
    from manyhands.place.kernels import as_measured, predict_here
    from manyhands.place.plan import find_plans

    found = predict_here(parse_config(checkpoint.config), checkpoint.tensors, home_from_env())
    alone = find_plans(task).alone
    return found if alone is None else as_measured(found, task.shape.precision, alone.tokens_per_s)


def _added(texts: list[str], fleet: "Fleet") -> "list[Machine]":
    from manyhands.place.machines import parse_what_if

    return [parse_what_if(text, fleet.get_machine(fleet.origin)) for text in texts]


def _as_object(task: "Task", plans: "Plans", said: list[str]) -> dict[str, Any]:
    """Everything the tables say; bytes and seconds."""
    missing = plans.missing
    return {
        "model": task.shape.name,
        "dtype": task.shape.precision,
        "layers": task.shape.num_layers,
        "tokens": task.tokens,
        "prompt": task.prompt,
        "origin": task.fleet.origin,
        "machines": [_machine_object(machine, task.capacity(machine)) for machine in task.fleet.machines],
        "plans": [_plan_object(plan) for plan in plans.ranked],
        "alone": None if plans.alone is None else _plan_object(plans.alone),
        "missing": missing and {"layers": str(missing.span), "needs_bytes": missing.needs_bytes},
        "advice": said,
    }


def _machine_object(machine: "Machine", capacity: int) -> dict[str, Any]:
    """JSON has no infinity: an uplink without a limit is null."""
    uplink = machine.uplink_Bps if machine.uplink_Bps < float("inf") else None
    return {**asdict(machine), "uplink_Bps": uplink, "layers_that_fit": capacity}


def _plan_object(plan: "PlacementPlan") -> dict[str, Any]:
    hops = [{**asdict(hop), "span": str(hop.span)} for hop in plan.hops]
    return {**asdict(plan), "hops": hops, "tokens_per_s": plan.tokens_per_s}


def _show(
    task: "Task", plans: "Plans", said: list[str], checkpoint: "Checkpoint", precisions: "dict[Precision, Predicted]"
) -> None:
    from rich.console import Console

    console = Console()
    total = size_of(sum(task.shape.layer_bytes) + task.shape.ends_bytes)
    console.print(
        f"{task.shape.name} in {task.shape.precision}: {task.shape.num_layers} layers, {total}; "
        f"cache for {task.tokens} tokens; prompts come to {task.fleet.origin}",
        highlight=False,
        markup=False,
    )
    if plans.ranked:
        _show_hops(console, task, plans.ranked[0])
        _show_ranking(console, plans)
    for line in said:
        typer.echo(fitted(line, sys.stdout))
    _show_precisions(checkpoint, precisions)


def _show_hops(console: Any, task: "Task", plan: "PlacementPlan") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("machine", "layers", "memory", "link ms", "compute ms", title="best placement, per token")
    for hop in plan.hops:
        needs = f"{size_of(hop.needs_bytes)} of {size_of(task.fleet.get_machine(hop.machine).memory_bytes)}"
        table.add_row(Text(hop.machine), str(hop.span), needs, _ms(hop.leg_s), _ms(hop.compute_s))
    origin = Text(f"{task.fleet.origin} (origin)")
    table.add_row(origin, "ends", size_of(task.shape.ends_bytes), _ms(plan.return_s), _ms(plan.ends_s))
    console.print(table)


def _show_ranking(console: Any, plans: "Plans") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("placement", "tokens/s", "first token s", title="expected, one stream without drafting")
    ranked = [*plans.ranked, *([plans.alone] if plans.alone and plans.alone not in plans.ranked else [])]
    for plan in ranked:
        table.add_row(Text(str(plan)), figure_of(plan.tokens_per_s), f"{plan.ttft_s:.2f}")
    console.print(table)


def _show_precisions(checkpoint: "Checkpoint", precisions: "dict[Precision, Predicted]") -> None:
    from rich.console import Console
    from rich.table import Table

    from manyhands.place.shape import all_bytes

    if not precisions:
        return
    table = Table("--dtype", "weights", "tokens/s", title="this machine alone, estimated")
    for each in precisions.values():
        table.add_row(each.precision, size_of(all_bytes(checkpoint, each.precision)), figure_of(each.tokens_per_s))
    Console().print(table)


def _ms(seconds: float) -> str:
    return figure_of(seconds * 1e3)
