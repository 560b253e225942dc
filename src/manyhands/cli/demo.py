"""`manyhands demo`: a story told by three processes, one of which is killed, then by one: are the texts identical?"""

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from manyhands.cli import options
from manyhands.cli.local import FaultInjector, InjectedFault, LocalPlan, local_swarm
from manyhands.core import SamplingParams

PROMPT = "Once upon a time there was a king who had three sons, and"


def demo(
    prompt: options.Prompt = PROMPT,
    max_tokens: options.MaxTokens = 160,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=12)] = 3,
    seed: options.Seed = 7,
) -> None:
    """Tell a story with the bundled model on several processes, kill one, and check the text against one process."""
    params = options.sampling_of(max_tokens=max_tokens, temperature=0.7, top_p=0.95, seed=seed)
    if not options.run(_demo(prompt, params, nodes)):
        raise typer.Exit(1)


async def _demo(prompt: str, params: SamplingParams, nodes: int) -> bool:
    at = params.max_tokens // 3
    typer.secho(
        f"tales on {nodes} node processes, each with its own layers, and a spare, over TLS on loopback;", bold=True
    )
    typer.secho(f"the process of the middle hop is killed (kill -9) after {at} tokens\n", bold=True)
    many = await _tell(LocalPlan("tales", nodes, spares=1), prompt, params, [InjectedFault("kill", nodes // 2, at, "")])
    typer.secho("\nthe same prompt on one node, undisturbed\n", bold=True)
    one = await _tell(LocalPlan("tales", 1), prompt, params, [])
    is_same = many == one
    verdict = "identical" if is_same else "DIFFERENT"
    typer.secho(f"\nthe two texts are {verdict}", bold=True, fg=None if is_same else "red")
    return is_same


async def _tell(plan: LocalPlan, prompt: str, params: SamplingParams, faults: Sequence[InjectedFault]) -> str:
    from manyhands.cli.show import print_figures, show_answer

    began = time.monotonic()
    async with local_swarm(plan) as (origin, nodes):
        load_s = time.monotonic() - began
        answer = origin.answer(origin.request(prompt, params))
        disturber = FaultInjector(faults, nodes, answer)
        await show_answer(origin, answer, as_json=False, lead=prompt, on_token=disturber.check)
        print_figures(answer, load_s)
        return answer.text
