"""`manyhands demo`: a story told by three processes, then by one, and whether the texts are identical."""

from typing import Annotated

import typer

from manyhands.cli import options
from manyhands.cli.local import local_swarm
from manyhands.core import SamplingParams

PROMPT = "Once upon a time there was a king who had three sons, and"


def demo(
    prompt: options.Prompt = PROMPT,
    max_tokens: options.MaxTokens = 160,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=12)] = 3,
    seed: options.Seed = 7,
) -> None:
    """Tell a story with the bundled model on several processes, then check it against one."""
    params = options.sampling_of(max_tokens=max_tokens, temperature=0.7, top_p=0.95, seed=seed)
    if not options.run(_demo(prompt, params, nodes)):
        raise typer.Exit(1)


async def _demo(prompt: str, params: SamplingParams, nodes: int) -> bool:
    typer.secho(f"tales on {nodes} node processes, each with its own layers, over TLS on loopback", bold=True)
    many = await _tell(prompt, params, nodes)
    typer.secho("\nthe same prompt on one node", bold=True)
    one = await _tell(prompt, params, 1)
    is_same = many == one
    typer.secho(
        f"\nthe two texts are {'identical' if is_same else 'DIFFERENT'}", bold=True, fg=None if is_same else "red"
    )
    return is_same


async def _tell(prompt: str, params: SamplingParams, nodes: int) -> str:
    import time

    from manyhands.cli.show import print_figures, print_route
    from manyhands.origin import Answer

    began = time.monotonic()
    async with local_swarm("tales", nodes, "", "bf16", "origin", None) as origin:
        load_s = time.monotonic() - began
        answer: Answer = origin.answer(origin.request(prompt, params))
        async for token in origin.stream(answer):
            if len(answer.token_ids) == 1:
                print_route(answer)
                typer.echo(prompt, nl=False)
            typer.echo(token.text, nl=False)
        typer.echo()
        print_figures(answer, load_s)
        return answer.text
