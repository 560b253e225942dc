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


def decode_layer_s(model: SpanModel, span: Span) -> float:
    """Median seconds of one layer of a decode step of one session."""
    cache = model.runner.new_cache(POSITION + 1, span)
    zeros = bytes(model.hidden_size * ITEMSIZE[model.wire_dtype])
    row = Payload(model.wire_dtype, model.hidden_size, zeros)
    work = Work(cache, span, POSITION, 1, POSITION, row, None, is_last=True)
    times = []
    if model.runner.session_bytes:  # states exist only after the positions before; keys and values may be unset
        model.runner.step(zeros * POSITION, [Piece(cache, 0, POSITION)], model.num_threads)
    for _ in range(WARM_UP + STEPS):
        cache.length = POSITION
        began = time.perf_counter()
        (result,) = model.run([work])
        times.append(time.perf_counter() - began)
        if isinstance(result, Exception):
            raise result
    return statistics.median(times[WARM_UP:]) / len(span)
