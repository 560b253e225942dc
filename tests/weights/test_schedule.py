"""Which tensor comes next from which provider (weights/schedule.py), without any provider."""

import random
from dataclasses import dataclass
from typing import Any, cast

import pytest

from manyhands.checkpoint.header import TensorEntry
from manyhands.weights.schedule import DownloadSchedule, TensorJob


@dataclass(slots=True)
class Looked:
    """A tensor's entry that counts how often it is looked at."""

    title: str
    size: int
    count: list[int]

    @property
    def name(self) -> str:
        self.count[0] += 1
        return self.title

    def __len__(self) -> int:
        return self.size


def entries(num: int, count: list[int]) -> list[TensorEntry]:
    return [cast(TensorEntry, Looked(f"t{number}", number, count)) for number in range(num)]


def test_nodes_that_lack_all_tensors_one_by_one_cost_no_more_than_that() -> None:
    """Each tensor was asked for behind a look at all that were lacked before: 20,000 took 6 s of the event loop, and each that
    another node then brought as many looks again by each node that waited."""
    count = [0]
    board = DownloadSchedule(entries(2000, count))
    for node in ("a", "b", "c"):
        while (job := board.take(node, 0.0)) is not None:
            board.lack(node, job.entry.name)
            board.give_back(job, job.turn)
    assert len(board.waiting) == 2000
    while (job := board.take("honest", 0.0)) is not None:
        assert [board.take(node, 0.0) for node in ("a", "b", "c")] == [None, None, None]
        board.finish(job, 1.0)
    assert board.is_done and count[0] < 20 * 2000


def test_an_empty_tensor_says_nothing_of_how_fast_a_node_is() -> None:
    """Who had brought one had the rate 0: a ZeroDivisionError ended the fetch as soon as another's tensor was looked at."""
    board = DownloadSchedule(entries(2, [0]))
    large, empty = board.take("slow", 0.0), board.take("quick", 0.0)
    assert large is not None and empty is not None and len(empty.entry) == 0
    board.finish(empty, 0.5)
    assert board.take("quick", 1000.0) is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_nodes_lack_give_back_and_lose_none_goes_idle_while_it_could_help(seed: int) -> None:
    chance, count = random.Random(seed), [0]
    board, nodes = DownloadSchedule(entries(30, count)), [f"n{number}" for number in range(4)]
    lacks: dict[str, set[str]] = {node: set() for node in nodes}
    taken: list[TensorJob] = []
    for now in range(2000):
        node, what = chance.choice(nodes), chance.random()
        if what < 0.5:
            could = [job for job in board.waiting if job.entry.name not in lacks[node]]
            job = None if node in board.dropped else board.take(node, float(now))
            if node not in board.dropped and could:
                assert job in could and job.node == node and job not in board.waiting
            if job is not None:
                assert job.entry.name not in lacks[node]
                taken = [each for each in taken if each is not job] + [job]
        elif taken:
            job = taken.pop(chance.randrange(len(taken)))
            if what < 0.6:
                board.finish(job, float(now))
                continue
            if what < 0.8 and job.node is not None:
                lacks[job.node].add(job.entry.name)
                board.lack(job.node, job.entry.name)
            elif what > 0.99 and job.node is not None and len(board.dropped) < 3:
                board.drop(job.node, is_untrusted=chance.random() < 0.5)
            board.give_back(job, job.turn)
        assert set(board.waiting).isdisjoint(board.running) and set(taken) == board.running
    everything: list[Any] = board.unfinished
    assert len(everything) == len(set(everything))
