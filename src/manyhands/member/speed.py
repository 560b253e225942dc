"""How fast a span that has just been loaded is: real device steps, milliseconds in all. Run it on the device's thread."""

import statistics
import time

from manyhands.core import Span
from manyhands.engine.span import Piece
from manyhands.wire.message import ITEMSIZE, Payload
from manyhands.worker.execute import SpanModel, Work

STEPS = 5
WARM_UP = 2
POSITION = 64  # as in a short chat
_NUMBER = b"\x3c"  # each byte of a number: about 0.01 in bf16 and fp32, 1 in fp16; a first row of zeros is refused


def decode_layer_s(model: SpanModel, span: Span, positions: int) -> float:
    """Median seconds of one layer of a decode step of one session, which may have so many `positions`, at least one: as many
    as the model has and a lease could have."""
    position = min(POSITION, positions - 1)
    cache = model.runner.new_cache(position + 1, span)
    numbers = _NUMBER * (model.hidden_size * ITEMSIZE[model.wire_dtype])
    row = Payload(model.wire_dtype, model.hidden_size, numbers)
    work = Work(cache, span, position, 1, position, row, None, is_last=True)
    times = []
    if position and model.runner.session_bytes:  # states have gone through the positions before
        model.runner.step(numbers * position, [Piece(cache, 0, position)], model.num_threads)
    for _ in range(WARM_UP + STEPS):
        cache.length = position
        began = time.perf_counter()
        (result,) = model.run([work])
        times.append(time.perf_counter() - began)
        if isinstance(result, Exception):
            raise result
    return statistics.median(times[WARM_UP:]) / len(span)
