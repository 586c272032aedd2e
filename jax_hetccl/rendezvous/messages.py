"""Messages of the control plane: msgpack lists with a type first, never pickle.

Sizes are bounded before decoding. What a port takes in one message is small (`PORT_BYTES`), because ZeroMQ takes that much
from strangers too; so members send what is longer in pieces. Together they are bounded as well (`MAX_BYTES`): a member of
the job may be wrong, but cannot exhaust us.
"""

from __future__ import annotations

from typing import Any, cast

import msgpack

# Raised when a message changes its meaning. Members and coordinator must speak the same one.
PROTOCOL = 5

# The record of a member with many devices and NICs has some KB.
PORT_BYTES = 64 << 10
PIECE_BYTES = 32 << 10
# A directory holds a record for each member; what members publish is smaller.
MAX_BYTES = 64 << 20


def pack(*fields: Any) -> bytes:
    """Encodes a message."""
    return cast(bytes, msgpack.packb(fields, use_bin_type=True))


def unpack(data: bytes | memoryview) -> list[Any] | None:
    """Decodes a message; None if it is not one."""
    try:
        fields = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):  # TypeError: a list or map as a map's key
        return None
    return fields if isinstance(fields, list) and fields and isinstance(fields[0], str) else None
