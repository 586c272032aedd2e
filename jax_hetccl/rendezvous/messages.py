"""Messages of the control plane: msgpack lists with a type first, never pickle.

Sizes are bounded by the sockets before decoding (`MAX_BYTES`): a member of the job may be wrong, but
cannot exhaust us.
"""

from __future__ import annotations

from typing import Any, cast

import msgpack

# Raised when a message changes its meaning. Members and coordinator must speak the same one.
PROTOCOL = 4

# A record is a few hundred bytes and a directory holds one per member; mesh agreements are smaller.
MAX_BYTES = 64 << 20


def pack(*fields: Any) -> bytes:
    """Encodes a message."""
    return cast(bytes, msgpack.packb(fields, use_bin_type=True))


def unpack(data: bytes | memoryview) -> list[Any] | None:
    """Decodes a message; None if it is not one."""
    try:
        fields = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException):
        return None
    return fields if isinstance(fields, list) and fields and isinstance(fields[0], str) else None
