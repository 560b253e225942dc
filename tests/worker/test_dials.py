"""manyhands.worker.dials: what a dial on behalf of an origin leaves behind."""

import asyncio

import pytest

from manyhands.core import NodeAddr
from manyhands.errors import LinkClosed
from manyhands.net.memory import MemoryNetwork
from manyhands.net.pool import LinkPool
from manyhands.net.setbacks import FIRST_S, Setbacks
from manyhands.testing.clock import run_virtual
from manyhands.worker.dials import Dials
from tests.net.links import ANYWHERE, A, B, says


@pytest.mark.parametrize("is_named", [True, False])
def test_failures_of_an_address_that_answered_count_no_more(is_named: bool) -> None:
    async def body() -> None:
        network, setbacks = MemoryNetwork(), Setbacks()
        target, pool = network.transport(B, says("b")), LinkPool(network.transport(A, says("a")))
        listening = await target.listen(ANYWHERE)
        addr = listening if is_named else NodeAddr(listening.host, listening.port)
        network.unbind(target)
        dials, loop = Dials(pool, setbacks), asyncio.get_running_loop()
        for _ in range(3):
            with pytest.raises(LinkClosed):
                await dials.reach(addr, A)
            await asyncio.sleep(setbacks.wait_s(B, addr, loop.time()))
        network.bind(listening, target)
        link = await dials.reach(addr, A)
        setbacks.failed(None, [addr], loop.time())
        assert setbacks.wait_s(B, addr, loop.time()) == FIRST_S
        link.abort("done")
        await pool.aclose()
        await target.aclose()

    run_virtual(body())
