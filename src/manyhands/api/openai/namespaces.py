"""Tools of /v1/responses in namespaces, as Codex sends those of an MCP server: to the model they are functions of longer names.
Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Object = dict[str, Any]


class Called(NamedTuple):
    """A tool as its client knows it."""

    name: str
    namespace: str  # "": none
    is_custom: bool

    def as_item(self) -> Object:
        """What an item of the output says of it."""
        return {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}


def flat_tools(tools: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The tools as the model is told of them; what is said of a namespace is told with its first one."""
    for tool in tools:
        if tool["type"] != "namespace":
            yield tool
            continue
        about = tool.get("description", "")
        for inner in tool["tools"]:
            described = "\n\n".join(filter(None, (about, inner.get("description", ""))))
            yield {**inner, "name": full_name(inner["name"], tool["name"]), "description": described}
            about = ""


def called_tools(tools: Iterable[Mapping[str, Any]]) -> dict[str, Called]:
    """The tools by the names that the model calls them by."""
    found: dict[str, Called] = {}
    for tool in tools:
        space = tool["name"] if tool["type"] == "namespace" else ""
        for inner in tool.get("tools", (tool,)):
            found[full_name(inner["name"], space)] = Called(inner["name"], space, inner["type"] == "custom")
    return found


def full_name(name: str, namespace: str = "") -> str:
    """The name of a tool to the model: mcp__files__read of mcp__files and of mcp__files__ alike."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name
