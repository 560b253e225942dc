"""How many layers a joining member takes by each strategy, and where they lie."""

import pytest

from manyhands.core import NodeId, Span
from manyhands.errors import BadRequest
from manyhands.place.joining import Company, JoinStrategy, _planned_with, share_of, strategy_of
from manyhands.place.living import MAX_MACHINES
from manyhands.place.machines import Machine
from manyhands.place.shape import ModelShape
from manyhands.place.strategy import Holding, choose_span
from tests.hostile.test_routes import cpu_s

SHAPE = ModelShape("m", "bf16", (1_000_000,) * 12, 0, (100,) * 12, 128, 1024, process_bytes=1000)
A, ME = NodeId("a"), NodeId("m")


def machine(name: str, layer_s: float = 0.01, *, layers: int = 12, cores: int = 1) -> Machine:
    return Machine(name, 1000 + layers * 1_100_000, layer_s, rtt_s=0.001, cores=cores)


def share(strategy: JoinStrategy, *others: Machine, me: Machine | None = None) -> int | None:
    machines = {NodeId(m.name): m for m in others} | {ME: me or machine("m")}
    rtts = {frozenset[str]((a, b)): 0.001 for a in machines for b in machines if a < b}
    found = share_of(strategy, Company(ME, A, machines, rtts), SHAPE, 64)
    return None if found is None else found.num_layers


def test_uniform_and_capacity_give_the_share_of_the_rule() -> None:
    assert share("uniform", machine("a"), machine("b")) == 4
    assert share("uniform", machine("a")) == 6
    assert share("capacity", machine("a"), me=machine("m", cores=3)) == 9, "three quarters of the cores"


def test_measured_gives_the_slower_machine_fewer_layers() -> None:
    """HN-53: memory alone would give all of them the same."""
    small = machine("a", layers=6)
    assert share("measured", small, me=machine("m", 0.01)) == 12, "one machine alone is faster than two"
    assert share("measured", small, machine("b", 0.01, layers=3), me=machine("m", 0.001, layers=6)) == 6
    assert share("measured", small, machine("b", 0.01, layers=5), me=machine("m", 0.1, layers=6)) == 1
    assert share("measured", machine("a"), me=machine("m", 0.1)) is None, "it would only be slower with it"


def test_made_up_nodes_make_a_plan_no_longer() -> None:
    """Records of thousands of nodes: those that are linked are planned with, and a bounded number of others."""
    near = [machine("a", layers=6), machine("b", 0.01, layers=3)]
    false = [machine(f"x{number:04}", 1e-6, layers=12) for number in range(4000)]
    company = Company(
        ME,
        A,
        {NodeId(m.name): m for m in (*near, *false, machine("m", 0.001, layers=6))},
        {frozenset[str]((ME, name)): 0.001 for name in "ab"} | {frozenset[str](("x0001", "x0002")): 0.001},
    )
    names = _planned_with(company)
    assert len(names) == MAX_MACHINES and {ME, A, "b"} <= set(names)
    assert cpu_s(lambda: share_of("measured", company, SHAPE, 64)) < 10


def test_where_there_is_no_share_as_much_as_helps_is_taken() -> None:
    assert share("uniform", *(machine(f"b{i:02}") for i in range(12)), machine("a")) is None
    assert share("cover", machine("a")) is None


def test_a_share_bounds_the_span_where_no_longer_run_is_missing() -> None:
    def chosen(held: str, most: int) -> str:
        return str(
            choose_span(SHAPE, [Holding(A, Span.parse(held))], 12 * 1_100_000 + 1000, tokens=64, share=most).span
        )

    assert chosen("0-11", 0) == "0-11" and chosen("0-11", 3) == "0-2"
    assert chosen("0-3", 6) == "4-11", "eight layers are missing"
    assert len(Span.parse(chosen("0-9", 6))) == 6, "two are missing: they and four beside"


def test_a_word_that_is_no_strategy() -> None:
    assert strategy_of("uniform") == "uniform"
    with pytest.raises(BadRequest, match="one of cover, measured, uniform, capacity"):
        strategy_of("best")
