"""What a hop signs is true, whenever it is asked."""

import threading
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.net.transport import Link
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.wire.attest_message import Attest, Attested
from manyhands.wire.message import Step
from manyhands.wire.signed import Signer
from manyhands.worker.attesting import ATTEST_S, Attesting
from tests.hostile.test_copies import reached
from tests.worker.hop import Hop, hidden, hop, session_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("attesting") / "qwen3", seed=4)


def test_nothing_is_signed_of_rows_while_they_are_computed(folder: Path) -> None:
    """An origin goes back to the beginning, with other rows, and asks meanwhile. (It got a signature that the old numbers had
    been made of the new rows: to others that would prove that the node computes wrong.)"""
    signer, first, other = Signer(Ed25519PrivateKey.generate()), hidden(8, 1), hidden(8, 2)

    async def asked(one: Hop, attesting: Attesting, now: float, until: int = 8) -> Attested:
        before = len(one.origin.of(Attested))
        attesting.on_attest(Attest(session_id(1), 1, 1, 0, until), cast(Link, one.origin), now)
        (said,) = one.origin.of(Attested)[before:]
        return said

    async def computed(one: Hop, steps: int) -> None:
        await one.until(lambda: len(one.after.of(Step)) == steps)

    async def main() -> None:
        async with hop(folder) as one:
            attesting = Attesting([one.host], signer)
            await one.open(1, attests=True)
            one.step(1, 0, first)
            await computed(one, 1)
            of_first = await asked(one, attesting, 0.0)
            model = one.host.engine.model
            assert model is not None
            begun, held, plain = threading.Event(), threading.Event(), model.runner.step

            def hold(*args: Any) -> Any:
                begun.set()
                held.wait()
                return plain(*args)

            cast(Any, model.runner).step = hold
            one.step(1, 4, other[4:], guess=1)
            await reached(begun)
            meanwhile = await asked(one, attesting, ATTEST_S)
            before_it = await asked(one, attesting, 2 * ATTEST_S, until=4)
            held.set()
            await computed(one, 2)
            of_other = await asked(one, attesting, 3 * ATTEST_S)
            assert None not in (of_first.given, of_first.made, of_other.given, of_other.made)
            assert of_first.given != of_other.given and of_first.made != of_other.made
            assert (meanwhile.given, meanwhile.made) == (None, None)
            assert None not in (before_it.given, before_it.made), "these do not change"

    run_virtual(main())
