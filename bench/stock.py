"""transformers as its users run it: a process of its own that knows none of our settings.

manyhands lets idle OpenMP threads sleep, which is set for a whole process and costs stock transformers a fifth of its speed.
Reads requests [ids, new] from standard input, a line of JSON each; answers with the seconds from the request to each token.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Stopwatch:
    """A streamer that keeps only when it was called."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self.began = clock, clock()
        self.at: list[float] = []

    def put(self, _: object) -> None:
        self.at.append(self._clock() - self.began)

    def end(self) -> None:
        pass


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.eval().generation_config.eos_token_id = None
    for line in sys.stdin:
        ids, new = json.loads(line)
        clock = Stopwatch()
        with torch.inference_mode():
            model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, streamer=clock)
        print(json.dumps(clock.at[1:]), flush=True)  # the first call brings the prompt


if __name__ == "__main__":
    main()
