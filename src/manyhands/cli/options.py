"""Options that several commands share, and how they become the dataclasses of core.py."""

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import typer

from manyhands.core import PRECISIONS, EndsAt, PathKind, Precision, SamplingParams
from manyhands.errors import BadRequest

T = TypeVar("T")

Model = Annotated[str, typer.Argument(help='A checkpoint folder, "tales", or a hub id org/name[@revision].')]
Prompt = Annotated[str, typer.Option("-p", "--prompt", help="The text to go on from.")]
MaxTokens = Annotated[int, typer.Option("-n", "--max-tokens", help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option("-t", "--temperature", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens that hold this much probability.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep this many of the likeliest tokens; 0 is all.")]
MinP = Annotated[float, typer.Option("--min-p", help="Keep tokens this likely relative to the likeliest.")]
Seed = Annotated[int, typer.Option("--seed", help="Same seed, same text, however the model is cut.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End the text before this string; may be repeated.")]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty", help="1 is none.")]
DType = Annotated[str, typer.Option("--dtype", help="Precision: bf16, fp32 or int8.")]
Path_ = Annotated[str, typer.Option("--path", help="ring: hop to hop; star: each hop answers the origin.")]
Shadow = Annotated[
    bool, typer.Option("--shadow", help="Spare nodes follow the request, so that a repair takes one short step.")
]
Ends = Annotated[str, typer.Option("--ends", help="Where embedding and head are: origin, or edges (first, last hop).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Ticket = Annotated[str, typer.Option("--ticket", envvar="MANYHANDS_TICKET", help="The swarm's ticket (mh1...).")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Compute threads; default: all cores, or one where that is faster."),
]


def precision_of(text: str) -> Precision:
    if text not in PRECISIONS or text == "fp16":
        raise BadRequest(f"--dtype is {text!r}; on a CPU it is one of bf16, fp32, int8")
    return text


def path_of(text: str) -> PathKind:
    if text not in ("ring", "star"):
        raise BadRequest(f"--path is {text!r}; it is ring or star")
    return text  # type: ignore[return-value]


def ends_of(text: str) -> EndsAt:
    if text not in ("origin", "edges"):
        raise BadRequest(f"--ends is {text!r}; it is origin or edges")
    return text  # type: ignore[return-value]


def sampling_of(**values: Any) -> SamplingParams:
    """SamplingParams of the options given. Raises BadRequest."""
    return SamplingParams(**{**values, "stop": tuple(values.get("stop") or ())})


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
