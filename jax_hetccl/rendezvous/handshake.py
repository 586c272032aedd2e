"""Mutual authentication of a data channel's socket, before anything else is read from it.

Four fixed-size messages, HMAC-SHA256 over everything said so far, with the key that only these two
members share in this world (`keys.pair_key`):

    dialer   -> acceptor   HELLO  magic, nonce, claim (who dials whom, which channel, which stripe)
    acceptor -> dialer     NONCE  nonce
    dialer   -> acceptor   PROOF  mac("dial", claim, both nonces)
    acceptor -> dialer     PROOF  mac("accept", claim, both nonces)

The dialer proves first, so a stranger gets nothing but a random number. Of the claim only the
dialer's index is looked at before its proof holds, to pick the key. Nonces are fresh and the key is
bound to the world's nonce: nothing can be replayed, in this world or another. Pure: no I/O.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import struct

from jax_hetccl.rendezvous import keys

_MAGIC = b"HETCCL\x00\x02"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_CLAIM = struct.Struct("<IIIIHHH8s8s")

HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES + _CLAIM.size
ANSWER_BYTES = _NONCE_BYTES
PROOF_BYTES = _PROOF_BYTES


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a socket is for: stripe `stripe` of `stripes` of channel `src` -> `dst`.

    `attempt` (8 random bytes) keeps the stripes of two attempts to open one channel apart. `port` is the place of the
    acceptor's port in what it published, for RDMA.
    """

    dialer: int
    acceptor: int
    src: int
    dst: int
    stripe: int
    stripes: int
    transport: str
    attempt: bytes
    port: int = 0

    def pack(self) -> bytes:
        """Encodes the claim in its fixed size."""
        numbers = (self.dialer, self.acceptor, self.src, self.dst, self.stripe, self.stripes, self.port)
        return _CLAIM.pack(*numbers, self.transport.encode(), self.attempt)

    @classmethod
    def unpack(cls, data: bytes) -> Claim:
        """Decodes a claim; only call it once its proof holds."""
        dialer, acceptor, src, dst, stripe, stripes, port, transport, attempt = _CLAIM.unpack(data)
        name = transport.rstrip(b"\0").decode("ascii", "replace")
        return cls(dialer, acceptor, src, dst, stripe, stripes, name, attempt, port)


def _mac(key: bytes, role: bytes, claim: bytes, dialer_nonce: bytes, acceptor_nonce: bytes) -> bytes:
    # All parts have fixed sizes, so their concatenation is unambiguous.
    return hmac.digest(key, role + claim + dialer_nonce + acceptor_nonce, hashlib.sha256)


class Dialer:
    """The side that opens a connection. Call the methods in the order of the messages."""

    def __init__(self, key: bytes, claim: Claim) -> None:
        """`key` is the one shared with the acceptor."""
        self._key = key
        self._claim = claim.pack()
        self._nonce = os.urandom(_NONCE_BYTES)
        self._answer = b""

    def hello(self) -> bytes:
        """The first message."""
        return _MAGIC + self._nonce + self._claim

    def proof(self, answer: bytes) -> bytes:
        """The third message, given the second."""
        self._answer = answer
        return _mac(self._key, b"dial--", self._claim, self._nonce, answer)

    def check(self, proof: bytes) -> bool:
        """Whether the fourth message proves the acceptor's identity."""
        expected = _mac(self._key, b"accept", self._claim, self._nonce, self._answer)
        return hmac.compare_digest(proof, expected)

    def stream_key(self) -> bytes:
        """The key for what follows on the connection; only its two ends have it."""
        return keys.stream_key(self._key, self._claim + self._nonce + self._answer)


class Acceptor:
    """The side that takes a connection."""

    def __init__(self, hello: bytes) -> None:
        """Takes the first message, of `HELLO_BYTES`. Raises ValueError if it is not ours."""
        if hello[: len(_MAGIC)] != _MAGIC:
            raise ValueError("not a hetccl channel")
        self._dialer_nonce = hello[len(_MAGIC) : len(_MAGIC) + _NONCE_BYTES]
        self._claim = hello[len(_MAGIC) + _NONCE_BYTES :]
        self._nonce = os.urandom(_NONCE_BYTES)

    @property
    def dialer(self) -> int:
        """The claimed dialer: not to be believed before `check`."""
        return struct.unpack_from("<I", self._claim)[0]

    def answer(self) -> bytes:
        """The second message."""
        return self._nonce

    def check(self, key: bytes, proof: bytes) -> Claim | None:
        """The claim, if the third message proves it with `key`."""
        expected = _mac(key, b"dial--", self._claim, self._dialer_nonce, self._nonce)
        return Claim.unpack(self._claim) if hmac.compare_digest(proof, expected) else None

    def proof(self, key: bytes) -> bytes:
        """The fourth message."""
        return _mac(key, b"accept", self._claim, self._dialer_nonce, self._nonce)

    def stream_key(self, key: bytes) -> bytes:
        """See `Dialer.stream_key`."""
        return keys.stream_key(key, self._claim + self._dialer_nonce + self._nonce)
