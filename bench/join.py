"""How long from `manyhands join` to serving? tales on loopback, in processes of their own; and how much of it is ours.

ours: what the joining process says that it took once Python had loaded the libraries and most of this package: meeting
the swarm, the claim, fetch, proof of the arithmetic, loading, measuring. import: the rest of the whole. The homes are new, so
nothing is remembered from an earlier start.
Run: python -m bench.join [--quick]
"""

import argparse
import asyncio
import sys
import time

from bench.colony import colony, complete
from bench.report import finish, measuring, spread

TARGET_S, OURS_S = 10.0, 3.0


async def measure(reps: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"join_s": [], "import_s": [], "ours_s": [], "first_answer_s": []}
    for _ in range(reps):
        async with colony(forked=False) as town:
            api = await town.found(town.resident("first"), "--layers", "0-5")
            second = town.resident("second")
            with measuring("join"):
                joined = await town.join(second)
            ours = float((await second.said("serving"))["seconds"])
            began = time.monotonic()
            while (await town.residents[0].view())["missing"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await complete(api, "Once upon a time", 8)
            figures["join_s"].append(joined)
            figures["import_s"].append(joined - ours)
            figures["ours_s"].append(ours)
            figures["first_answer_s"].append(time.monotonic() - began)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    figures = asyncio.run(measure(3 if parser.parse_args().quick else 7))
    told = {name: spread(samples) for name, samples in figures.items()}
    holds = {
        "join_s": told["join_s"]["median"] <= TARGET_S,
        "ours_s": told["ours_s"]["median"] <= OURS_S,
    }
    return finish("join", told, {"join_s": TARGET_S, "ours_s": OURS_S}, holds)


if __name__ == "__main__":
    sys.exit(main())
