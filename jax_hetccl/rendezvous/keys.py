"""Keys derived from the job's secret.

Model. Whoever knows the secret is a member of the job; whoever does not is a stranger and gets no
answer. Keys of the *joining* connections are derived from the secret with HKDF, one pair per member
and one for the coordinator, so that the coordinator knows which member a connection belongs to from
the key in use, not from what it claims. A member could derive another member's joining key (it knows
the secret), so these keys stop strangers and mistakes, not a malicious member. After joining, members
speak with *fresh* key pairs that they exchange through the coordinator: those no other member can
derive, no later leak of the secret reveals, and no other world accepts.

Without a secret (loopback coordinators only) the same keys are derived from nothing secret: the
connections are still encrypted and names still bound to keys, but every local user could join.
"""

from __future__ import annotations

import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

COORDINATOR = "coordinator"


def derive(secret: str | None, *labels: str) -> bytes:
    """Derives 32 key bytes from the secret for one purpose, named by `labels` (order matters)."""
    material = b"hetccl: no secret" if secret is None else b"hetccl: secret " + secret.encode()
    return _hkdf(material, b"", labels)


def _hkdf(material: bytes, salt: bytes, labels: tuple[str, ...]) -> bytes:
    # Length-prefixed, so that ("a", "bc") and ("ab", "c") are different purposes.
    info = b"".join(len(label).to_bytes(4, "big") + label.encode() for label in labels)
    return HKDF(SHA256(), 32, salt=salt, info=info).derive(material)


def curve_pair(secret: str | None, world: str, name: str) -> tuple[bytes, bytes]:
    """Returns the (public, secret) CURVE keys, in Z85, of member `name` for joining `world`.

    Args:
      secret: the job's secret or None.
      world: the world's identity, such as `left:1,right:2`; empty for the coordinator, whose key
        must be computable by members that disagree about the world so that they can be told.
      name: `cluster/process` or `COORDINATOR`.
    """
    private = z85.encode(derive(secret, "hetccl curve 1", world, name))
    return zmq.curve_public(private), private


def pair_key(mine: bytes, theirs: bytes, nonce: bytes, members: tuple[str, str]) -> bytes:
    """Returns the key that two members of one world share, and no third one knows.

    Args:
      mine: this member's fresh CURVE secret key (Z85).
      theirs: the other member's CURVE public key (Z85), from the world's directory.
      nonce: the world's nonce: the key is of no use in another world.
      members: both names; the order does not matter.
    """
    private = X25519PrivateKey.from_private_bytes(z85.decode(mine))
    shared = private.exchange(X25519PublicKey.from_public_bytes(z85.decode(theirs)))
    return _hkdf(shared, nonce, ("hetccl channel 1", *sorted(members)))


def stream_key(pair: bytes, spoken: bytes) -> bytes:
    """Returns the key of one connection between two members, for what is encrypted on it.

    Args:
      pair: their `pair_key`.
      spoken: what the two said when they met on this connection, fresh nonces of both included.
    """
    return _hkdf(pair, spoken, ("hetccl stream 1",))
