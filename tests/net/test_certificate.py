"""Membership is a chain to the key that the secret derives."""

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from manyhands.errors import LinkClosed
from manyhands.net.certificate import (
    _NOT_AFTER,
    _NOT_BEFORE,
    _ca_certificate,
    _leaf_certificate,
    _name,
    node_id_of,
    peer_of,
    swarm_ca_key,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


def test_every_member_derives_the_same_certificates() -> None:
    first, second = (_ca_certificate(swarm_ca_key(bytes(32))) for _ in range(2))
    assert first.public_bytes(Encoding.DER) == second.public_bytes(Encoding.DER)
    assert swarm_ca_key(b"\1" * 32).public_key() != swarm_ca_key(bytes(32)).public_key()


def test_the_swarm_key_never_changes() -> None:
    """A change would part nodes of different versions: bump _CA_INFO instead, knowingly."""
    assert node_id_of(swarm_ca_key(bytes(32)).public_key()).startswith("b2d4c1be5f811036")


def test_a_leaf_is_issued_by_the_ca_and_names_the_node() -> None:
    ca_key = swarm_ca_key(bytes(32))
    ca = _ca_certificate(ca_key)
    leaf = _leaf_certificate(KEY.public_key(), ca, ca_key)
    leaf.verify_directly_issued_by(ca)
    assert peer_of(leaf.public_bytes(Encoding.DER)) == node_id_of(KEY.public_key())


def test_no_certificate_or_another_kind_of_key_has_no_identity() -> None:
    curve = ec.generate_private_key(ec.SECP256R1()).public_key()
    builder = x509.CertificateBuilder(_name("x"), _name("y"), curve, 1, _NOT_BEFORE, _NOT_AFTER)
    with pytest.raises(LinkClosed, match="cannot be read"):
        peer_of(b"nonsense")
    for der in (None, builder.sign(KEY, None).public_bytes(Encoding.DER)):
        with pytest.raises(LinkClosed, match="does not hold a node key"):
            peer_of(der)
