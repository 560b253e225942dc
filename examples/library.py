"""A text through three nodes in this process: each has its own layers, its own thread, and links to the others.

python examples/library.py                       a tiny random model (its text is noise)
python examples/library.py tales "Once upon"     a folder, "tales" or a hub id, and a prompt
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.manifest import Silent
from manyhands.config import home_from_env
from manyhands.core import SamplingParams, even_cut
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.weights.fetch import resolve_model


async def tell(folder: Path, prompt: str) -> str:
    num_layers = read_facts(folder).num_layers
    cut = ",".join(map(str, even_cut(num_layers, 3)))
    params = SamplingParams(max_tokens=24, temperature=0.7, top_p=0.95, seed=7)
    async with memory_swarm(folder, cut) as swarm:
        answer = swarm.origin.answer(swarm.origin.request(prompt, params))
        async for token in swarm.origin.stream(answer):
            print(token.text, end="", flush=True)
        print()
        for offer in answer.route:
            print(f"layers {offer.info.span} on {offer.name} ({offer.node[:8]})")
        print(f"exactness {answer.exactness}, finish: {answer.finish_reason}")
        return answer.text


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else ""
    prompt = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"
    with tempfile.TemporaryDirectory() as made:
        if model:
            folder = resolve_model(model, None, True, home_from_env(), Silent())
        else:
            folder = make_tiny("qwen3", Path(made) / "tiny", layers=6, seed=7)
        asyncio.run(tell(folder, prompt))


if __name__ == "__main__":
    main()
