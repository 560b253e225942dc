"""By what a node that did not open a session may go on with what its hops have parked of it. Pure.

    handle, a secret of the stream ─ proof_of(handle, node) ─► shown to that node in Open.resume
                                             └─ adopted_name(proof) ─► told to it in Open.adoption, when the session opens

A hop has the name, which is a hash, until another origin shows the proof; and neither is worth anything at another hop.
"""

import hashlib
import hmac

from manyhands.core import NodeId, SessionId


def proof_of(handle: bytes, node: NodeId) -> SessionId:
    """What proves to `node` that the sender has `handle`."""
    return SessionId(hmac.digest(handle, b"manyhands adopt\0" + bytes.fromhex(node), "sha256")[:16])


def adopted_name(proof: SessionId) -> SessionId:
    """What the node was told when the session was opened."""
    return SessionId(hashlib.sha256(b"manyhands adopted\0" + proof).digest()[:16])
