"""manyhands.model.threads: small operations run alone, large ones share, and nothing is left behind."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from manyhands.model import threads
from tests.model.pipeline import threads as device_of


def test_a_device_stays_as_large_as_it_is_inside() -> None:
    """Nested: one thread for a step, all of them for a large product within it, and one again after it."""
    with device_of(2):
        with threads.using(1):
            assert (torch.get_num_threads(), threads.available()) == (1, 2)
            with threads.using(threads.for_product(1, 4096, 4096)):
                assert (torch.get_num_threads(), threads.available()) == (2, 2)
            assert (torch.get_num_threads(), threads.available()) == (1, 2)
        assert (torch.get_num_threads(), threads.available()) == (2, 2)


def test_an_error_inside_leaves_the_device_as_it_was() -> None:
    with device_of(2):
        with pytest.raises(ZeroDivisionError), threads.using(1):
            raise ZeroDivisionError
        assert (torch.get_num_threads(), threads.available()) == (2, 2)


@pytest.mark.parametrize(
    ("shape", "cores", "want"),
    [
        ((1, 96, 64), 2, 1),  # small: waking a thread costs more
        ((1, 4096, 4096), 1, 1),
        ((1, 4096, 4096), 2, 2),
        ((1, 4096, 4096), 16, 16),
        ((1, 896, 4864), 16, 7),  # few rows for so many threads: they would share the sums
        ((1, 64, 1 << 20), 16, 1),
        ((32, 448, 448), 2, 1),
        ((256, 448, 448), 2, 2),  # a prompt: computing it takes longer than waking a thread
    ],
)
def test_threads_of_a_product(shape: tuple[int, int, int], cores: int, want: int) -> None:
    with device_of(cores):
        assert threads.for_product(*shape) == want


def test_attention_is_shared_over_long_contexts_only() -> None:
    with device_of(2):
        assert threads.for_attention(16, 512, 64) == 1
        assert threads.for_attention(16, 8192, 64) == 2


def test_a_device_that_was_given_threads_shares_only_what_asks_for_it() -> None:
    before = torch.get_num_threads()

    def on_a_thread_of_its_own() -> list[tuple[int, int]]:
        threads.give(2)
        seen = [(torch.get_num_threads(), threads.available())]
        with threads.using(threads.for_product(1, 4096, 4096)):
            seen.append((torch.get_num_threads(), threads.available()))
        return [*seen, (torch.get_num_threads(), threads.available())]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(on_a_thread_of_its_own).result() == [(1, 2), (2, 2), (1, 2)]
    torch.set_num_threads(before)
