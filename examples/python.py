"""A program as a client: a swarm of two node processes on this machine, then the same swarm by its gateway's address.

python examples/python.py                     of "tales", the bundled model
python examples/python.py MODEL               of another: a checkpoint folder, a GGUF file, a hub id
"""

import asyncio
import sys

import manyhands


async def three_at_once(client: manyhands.Client) -> None:
    """Async use of the same client."""
    made = await asyncio.gather(*(client.agenerate("Once", max_tokens=8, temperature=1.0, seed=i) for i in range(3)))
    print(f"{len(made)} answers, {sum(one.completion_tokens for one in made)} tokens")


def ask(model: str) -> None:
    with manyhands.local_swarm(model, nodes=2, threads=1) as client:
        with client.stream("Once upon a time", max_tokens=12, temperature=0.0) as stream:
            for piece in stream:
                print(piece.text, end="", flush=True)
        print()
        for hop in stream.completion.route:
            print(f"layers {hop.layers} on {hop.name}")
        odds = client.generate("Once upon a time", max_tokens=3, temperature=0.0, logprobs=2).pieces
        print([round(piece.logprob or 0.0, 2) for piece in odds])
        asyncio.run(three_at_once(client))
        cut = client.stream("Once upon a time", max_tokens=200)
        next(cut)
        cut.cancel()
        print(f"finish: {cut.completion.finish_reason}")


if __name__ == "__main__":
    ask(sys.argv[1] if len(sys.argv) > 1 else "tales")
