"""Membership as a certificate chain: a node that knows the swarm secret can sign a certificate for its own node key.

    swarm secret ─ HKDF ─► the swarm's CA key (Ed25519) ─ signs ─► leaf of a node's own Ed25519 key

Every member derives the same CA, so "the chain verifies" means "knows the secret", and TLS itself proves that the peer
holds the leaf's key. Dates are not looked at: a member can always sign anew, so they would only break wrong clocks.
"""

import datetime
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from manyhands.core import NodeId
from manyhands.errors import LinkClosed

_CA_INFO = b"manyhands swarm CA v1"
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which `ssl` does not name
_NOT_BEFORE = datetime.datetime(2000, 1, 1)
_NOT_AFTER = datetime.datetime(9999, 12, 31)


def swarm_ca_key(secret: bytes) -> Ed25519PrivateKey:
    """The CA key that every holder of the 32-byte swarm secret derives."""
    seed = HKDF(hashes.SHA256(), length=32, salt=None, info=_CA_INFO).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)


def node_id_of(key: Ed25519PublicKey) -> NodeId:
    return NodeId(key.public_bytes_raw().hex())


def peer_of(leaf_der: bytes | None) -> NodeId:
    """The NodeId of a leaf certificate that TLS has verified. Raises LinkClosed for none, or another kind of key."""
    try:
        key = x509.load_der_x509_certificate(leaf_der).public_key() if leaf_der else None
    except (ValueError, UnsupportedAlgorithm) as exc:  # stricter than the TLS library, or a key it does not know
        raise LinkClosed(f"the peer's certificate cannot be read: {exc}") from exc
    if not isinstance(key, Ed25519PublicKey):
        raise LinkClosed("the peer's certificate does not hold a node key")
    return node_id_of(key)


def server_context(key: Ed25519PrivateKey, secret: bytes) -> ssl.SSLContext:
    """TLS for the listening side. The session tickets are off: each link proves membership anew."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, key, secret)
    context.num_tickets = 0
    return context


def client_context(key: Ed25519PrivateKey, secret: bytes) -> ssl.SSLContext:
    """TLS for the dialling side."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, key, secret)


def own_certificate(key: Ed25519PrivateKey, secret: bytes) -> bytes:
    """The certificate (DER) that both contexts show for `key`: equal inputs give equal bytes."""
    ca_key = swarm_ca_key(secret)
    leaf = _leaf_certificate(key.public_key(), _ca_certificate(ca_key), ca_key)
    return leaf.public_bytes(serialization.Encoding.DER)


def _context(protocol: int, key: Ed25519PrivateKey, secret: bytes) -> ssl.SSLContext:
    ca_key = swarm_ca_key(secret)
    ca = _ca_certificate(ca_key)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a peer is identified by its key, not by a name
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= _NO_CHECK_TIME
    context.load_verify_locations(cadata=_pem(ca).decode())
    _load_chain(context, _leaf_certificate(key.public_key(), ca, ca_key), key)
    return context


def _load_chain(context: ssl.SSLContext, leaf: x509.Certificate, key: Ed25519PrivateKey) -> None:
    """Give the context its certificate. `ssl` reads keys from files only: ours is encrypted, 0600 and gone at once."""
    password = Ed25519PrivateKey.generate().private_bytes_raw().hex().encode()
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with tempfile.NamedTemporaryFile(prefix="manyhands-", suffix=".pem") as file:
        Path(file.name).write_bytes(key_pem + _pem(leaf))
        context.load_cert_chain(file.name, password=password)


def _ca_certificate(ca_key: Ed25519PrivateKey) -> x509.Certificate:
    subject = _name("manyhands swarm")
    public = ca_key.public_key()
    builder = _builder(subject, subject, public, public)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(_usage(signs=False), critical=True).sign(ca_key, None)


def _leaf_certificate(key: Ed25519PublicKey, ca: x509.Certificate, ca_key: Ed25519PrivateKey) -> x509.Certificate:
    builder = _builder(_name(node_id_of(key)), ca.subject, key, ca_key.public_key())
    purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True).add_extension(purposes, critical=False)
    return builder.sign(ca_key, None)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Ed25519PublicKey, issuer_key: Ed25519PublicKey
) -> x509.CertificateBuilder:
    """What both certificates share. Everything in it is derived, so equal inputs give equal bytes."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes_raw())
    serial = int.from_bytes(digest.finalize()[:19], "big") | 1  # RFC 5280: positive, at most 20 bytes
    return (
        x509.CertificateBuilder(issuer, subject, key, serial, _NOT_BEFORE, _NOT_AFTER)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    """A leaf signs handshakes; a CA signs certificates only."""
    return x509.KeyUsage(
        digital_signature=signs,
        key_cert_sign=not signs,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
