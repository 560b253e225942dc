"""`manyhands demo`: a question answered by three processes, one of which is killed on the way: does the text change?"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from manyhands.cli import options
from manyhands.cli.ahead import import_ahead
from manyhands.cli.lines import Flow, fitted, width_of
from manyhands.cli.local import FaultInjector, InjectedFault, LocalPlan, local_swarm
from manyhands.cli.progress import doing
from manyhands.core import SamplingParams
from manyhands.errors import ManyhandsError
from manyhands.plain import one_line

if TYPE_CHECKING:
    from manyhands.local import NodeProcess
    from manyhands.origin import Answer, Origin
    from manyhands.origin.loop import Request

MODEL: Final = "smollm2"
QUESTION: Final = "What is photosynthesis?"
KILL_AT: Final = 40  # tokens
FALLBACK: Final = "tales"  # comes with manyhands; it goes on from a text and answers no question
BEGINNING: Final = "Once upon a time there was a king who had three sons, and"


@dataclass(frozen=True, slots=True)
class Script:
    """What is asked of which model. `is_question`: else the model goes on from the text."""

    model: str
    text: str
    params: SamplingParams

    @property
    def is_question(self) -> bool:
        return self.model != FALLBACK


def demo(
    prompt: Annotated[
        str,
        typer.Option("-p", "--prompt", callback=options.is_text, help="What to ask; default: what photosynthesis is."),
    ] = "",
    model: Annotated[
        str, typer.Option("--model", help="A model that chats, or tales; default: smollm2, or tales without a network.")
    ] = "",
    max_tokens: options.MaxTokens = 160,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=12, help="How many node processes, beside a spare.")] = 3,
    seed: options.Seed = 2,
) -> None:
    """Ask a question of several processes, kill one on the way, and compare the text with that of one process alone."""
    options.sampling_of(max_tokens=max_tokens, seed=seed)  # wrong ones are refused before anything is fetched
    name = _fetched(model)
    warmth = 0.7 if name == FALLBACK else 0.3
    params = options.sampling_of(max_tokens=max_tokens, temperature=warmth, top_p=0.95, seed=seed)
    script = Script(name, prompt or (BEGINNING if name == FALLBACK else QUESTION), params)
    with doing(f"reading {name}"):
        import_ahead(owns_requests=True)
    if not options.run(_demo(script, nodes)):
        raise typer.Exit(1)


def _fetched(model: str) -> str:
    """The model to use, fetched to this machine: as named, else smollm2, else the one that needs no fetching."""
    with doing(f"looking for {model or MODEL}") as screen:
        from manyhands.config import home_from_env
        from manyhands.weights.fetch import resolve_model

        try:
            resolve_model(model or MODEL, None, True, home_from_env(), screen)
        except ManyhandsError as error:
            if model:
                raise
            screen.clear()
            said = f"{MODEL} cannot be fetched, so {FALLBACK} writes a story instead\n  {one_line(error, 600)}\n"
            typer.echo(fitted(said, sys.stdout))
            return FALLBACK
    return model or MODEL


async def _demo(script: Script, nodes: int) -> bool:
    fault = InjectedFault("kill", nodes // 2, min(KILL_AT, script.params.max_tokens // 2), "")
    precision = options.precision_of("auto", script.model)
    async with local_swarm(LocalPlan(script.model, nodes, precision=precision, spares=1)) as (origin, running):
        _introduce(script, running)
        many = await _tell(script, origin, running, fault)
        with doing("asking the spare alone, undisturbed"):
            one = await _ask_alone(script, origin, running[-1])
    if many.text == one:
        same = "\none node alone gives the same text, letter for letter: the two texts are identical"
        typer.secho(fitted(same, sys.stdout), bold=True)
        return True
    typer.secho(f"\nTHE TEXTS ARE DIFFERENT; one node alone gives\n\n{one}", bold=True, fg="red")
    return False


def _introduce(script: Script, running: "Sequence[NodeProcess]") -> None:
    count = len(running) - 1
    what = f"{script.model} on {count} processes of this machine, each with some of its layers, and a spare"
    typer.secho(fitted(what, sys.stdout), bold=True)
    for node in running:
        typer.secho(f"  {node.name:<8} layers {node.span!s:<7} process {node.process.pid}", dim=True)
    if script.is_question:
        typer.secho(f"\n> {one_line(script.text, 2000)}", bold=True)
    typer.echo()


async def _tell(script: Script, origin: "Origin", running: "Sequence[NodeProcess]", fault: InjectedFault) -> "Answer":
    """Print the answer as it comes, and what happens to the nodes meanwhile."""
    from manyhands.cli.show import for_stdout

    answer = origin.answer(_request(script, origin))
    injector = FaultInjector([fault], running, answer)
    last, pause_s, repaired, is_within_line = time.monotonic(), 0.0, 0, True
    flow = Flow(width_of(sys.stdout))
    typer.echo("" if script.is_question else flow.feed(script.text), nl=False)
    async for token in origin.stream(answer):
        now = time.monotonic()
        pause_s, last = max(pause_s, now - last if len(answer.token_ids) > 1 else 0.0), now
        if len(answer.repairs) > repaired:
            names = ", ".join(answer.repairs[-1].replacement)
            typer.echo(flow.end() + "\n\n" * is_within_line, nl=False)
            typer.secho(f"── {names} has taken over: {pause_s:.2f} s without a word, and it goes on\n", fg="green")
            repaired = len(answer.repairs)
        typer.echo(flow.feed(for_stdout(token.text)), nl=False)
        is_within_line |= bool(token.text)
        for name in injector.check():
            layers = next(offer.info.span for offer in answer.route if offer.name == name)
            typer.secho(f"{flow.end()}\n\n── {name} is killed (kill -9): layers {layers} are gone", fg="red")
            is_within_line = False
    speed = answer.timings.decode_tokens_per_s(len(answer.token_ids)) or 0.0
    said = f"{len(answer.token_ids)} tokens · {speed:.0f} tokens/s · longest pause {pause_s:.2f} s"
    typer.echo(flow.end())
    typer.secho(f"\n{said}", dim=True)
    return answer


async def _ask_alone(script: Script, origin: "Origin", node: "NodeProcess") -> str:
    """The same of a node that holds every layer."""
    offers = [offer for offer in await origin.routes.offers(()) if offer.name == node.name]
    answer = await origin.complete(_request(script, origin), route=offers[:1])
    return answer.text


def _request(script: Script, origin: "Origin") -> "Request":
    if not script.is_question:
        return origin.request(script.text, script.params)
    return origin.request([{"role": "user", "content": script.text}], script.params)
