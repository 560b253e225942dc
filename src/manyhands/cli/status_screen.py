"""What `manyhands status` shows: a pure function of the view that a member gives."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from manyhands.core import Span
from manyhands.plain import counted, one_line, size_of

MIN_CELLS, MAX_CELLS = 12, 64  # of a strip; a deeper model, or a narrow terminal, has several layers in a cell
# The columns beside name, strip and layers, with their widths; those that a narrow terminal is shown without, in order.
COLUMNS = {"sessions": 8, "queue": 5, "ms/layer": 8, "latency": 7, "seen": 4, "link": 7}
LEFT_OUT = ("seen", "queue", "sessions", "ms/layer", "link", "latency")
MOST_DISTANCES = 8  # nodes in the table of round trips
SERVED_BY = "served by"
_MARKS = {"serving": "█", "loading": "▒", "spare": "░"}
_COLOURS = {"serving": "green", "loading": "cyan", "spare": "blue"}


def render(view: dict[str, Any], width: int) -> RenderableType:
    """The view of `GET /api/swarm` for people. Names come from other nodes: they are text, never markup."""
    parts: list[RenderableType] = [_head(view)]
    names = max([len(SERVED_BY), *(len(node["name"][:24]) for node in view["nodes"])])
    layers = max([len("layers"), *(len(_layers(span)) for node in view["nodes"] for span in node["spans"])])
    room = width - names - layers - 3  # a space behind each
    shown = columns_within(room - MIN_CELLS)
    most = max(MIN_CELLS, min(MAX_CELLS, room - _cells(shown)))
    for model in view["models"]:
        parts += [Text(), _title(model), _table(model, view["nodes"], most, shown)]
    if idle := [node for node in view["nodes"] if not node["spans"]]:
        named = ", ".join(f"{one_line(n['name'])} ({size_of(n['memory_bytes'])}, {_way(n)})" for n in idle)
        parts += [Text(), Text(f"without layers: {named}")]
    if (distances := _distances(view["nodes"])) is not None:
        parts += [Text(), distances]
    notes = [(line, "red") for line in (*view["missing"], *view["complaints"])]
    notes += [(line, "yellow") for line in view["warnings"]]
    parts += [Text(), *(Text(f"! {one_line(line)}", colour) for line, colour in notes)] if notes else []
    return Group(*parts)


def columns_within(room: int) -> list[str]:
    """The names of those COLUMNS that so many cells have room for."""
    shown = list(COLUMNS)
    for name in LEFT_OUT:
        if _cells(shown) <= room:
            break
        shown.remove(name)
    return shown


def _cells(shown: Sequence[str]) -> int:
    return sum(COLUMNS[name] + 1 for name in shown)


def _head(view: dict[str, Any]) -> Text:
    running = view["sessions"]
    parts = [
        f"{counted(len(view['nodes']), 'node')} ({one_line(view['directory'])})",
        f"{counted(running, 'request')} run{'s' * (running == 1)} here",
    ]
    if view["api"]:
        parts.append(one_line(f"API {view['api']}"))
    name = one_line(view["swarm"])  # that of `local` and `serve` has none
    return Text.assemble("swarm ", (name, "bold"), "  " * bool(name), " · ".join(parts))


def _title(model: dict[str, Any]) -> Text:
    return Text.assemble(
        (one_line(model["name"]), "bold"),
        one_line(f"  {model['precision']}, {model['layers']} layers, id {model['id'][:12]}"),
    )


def _table(model: dict[str, Any], nodes: Sequence[dict[str, Any]], most: int, shown: Sequence[str]) -> Table:
    """A row for each span, its layers in line with those of the last row: by how many nodes each layer is held."""
    num_layers = model["layers"]
    groups = groups_of(num_layers, most)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("node", no_wrap=True)
    table.add_column(ruler(groups), no_wrap=True)
    table.add_column("layers", no_wrap=True)
    for name in shown:
        table.add_column(name, justify="left" if name == "link" else "right", no_wrap=True)
    for node in nodes:
        for span in node["spans"]:
            if (span["model_id"], span["precision"]) == (model["id"], model["precision"]):
                told = _told(node, span)
                table.add_row(*_row(node, span, groups), *(told[name] for name in shown))
    table.add_row(Text(SERVED_BY, "dim"), coverage_strip(model["coverage"], groups))
    return table


def _distances(nodes: Sequence[dict[str, Any]]) -> Table | None:
    """Round trips from node to node as they state them, and uplinks; None while no two others have measured theirs."""
    shown = [node for node in nodes if node.get("near")][:MOST_DISTANCES]
    if len(shown) < 2:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("latency, ms", no_wrap=True)
    for node in shown:
        table.add_column(Text(one_line(node["name"])[:12]), justify="right", no_wrap=True)
    table.add_column("uplink", justify="right", no_wrap=True)
    for node in shown:
        ms = {near["node"]: f"{near['rtt_ms']:.1f}" for near in node["near"]}
        uplink = "-" if node["uplink_Bps"] is None else f"{node['uplink_Bps'] * 8e-6:.1f} Mbit/s"
        name = Text(one_line(node["name"])[:24], "bold" if node["is_me"] else "")
        table.add_row(name, *(Text(ms.get(other["node"], "·")) for other in shown), Text(uplink))
    return table


def _row(node: dict[str, Any], span: dict[str, Any], groups: Sequence[range]) -> list[Text]:
    name = Text(one_line(node["name"])[:24], "bold" if node["is_me"] else "")
    return [name, span_strip(Span.parse(span["layers"]), groups, span["state"]), Text(_layers(span))]


def _layers(span: dict[str, Any]) -> str:
    return one_line(span["layers"] if span["state"] == "serving" else f"{span['layers']} {span['state']}")


def _told(node: dict[str, Any], span: dict[str, Any]) -> dict[str, Text]:
    """What stands in each of COLUMNS."""
    rtt, layer, spoke = node["rtt_ms"], span["layer_ms"], node["spoke_s_ago"]
    return {
        "sessions": Text(f"{span['sessions']}/{span['max_sessions']}"),
        "queue": Text(str(span["queue"] or "-"), "yellow" if span["queue"] else ""),
        "ms/layer": Text("-" if layer is None else f"{layer:.2f}"),
        "latency": Text("-" if rtt is None else f"{rtt:.1f} ms"),
        "seen": Text("-" if spoke is None else f"{spoke:.0f} s"),
        "link": Text(_way(node), "yellow" if node["path"] == "relay" else ""),
    }


def _way(node: dict[str, Any]) -> str:
    return "here" if node["is_me"] else one_line(node["path"] or "no link")


def groups_of(num_layers: int, most: int) -> list[range]:
    """The layers that each cell of a strip stands for: at least one, none in two cells."""
    count = min(num_layers, most)
    return [range(cell * num_layers // count, (cell + 1) * num_layers // count) for cell in range(count)]


def ruler(groups: Sequence[range]) -> str:
    """The numbers of layers above a strip, one every ten cells."""
    marks = (str(group.start).ljust(10) for group in groups[::10])
    return "".join(marks)[: max(len(groups), 6)].rstrip()


def span_strip(span: Span, groups: Sequence[range], state: str) -> Text:
    """Where a span lies in the model."""
    held = (group.start < span.end and span.start < group.stop for group in groups)
    return Text("".join(_MARKS[state] if is_held else "·" for is_held in held), _COLOURS[state])


def coverage_strip(coverage: Sequence[int], groups: Sequence[range]) -> Text:
    """By how many nodes the layers are held: 0 to 9, then +; a cell of several layers shows its weakest."""
    strip = Text()
    for group in groups:
        least = min(coverage[group.start : group.stop])
        strip.append(
            "+" if least > 9 else str(least), "bold red" if least == 0 else "yellow" if least == 1 else "green"
        )
    return strip
