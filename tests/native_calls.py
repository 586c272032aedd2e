"""The native engine's custom calls in small programs, and the protocol's message header, for tests that play a peer."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hetccl import _native, session

EPOCH = 0xE90C
PROGRAM = 0xAB
PLAN = 7
WIRE = 0x1234
# magic, version, header bytes, type, index, epoch, program, occurrence, wire id, payload bytes, source, destination, text
HEADER = struct.Struct("<IHHIIQQQQQII128s")
MAGIC = 0x4C434348
TOKEN = jax.ShapeDtypeStruct((4,), jnp.uint32)


@contextlib.contextmanager
def current_engine(**bounds: float) -> Iterator[_native.Engine]:
    """An engine for rank 0 of a world of two, to which programs go. Its bounds are in seconds."""
    session._register_targets("cpu")
    made = _native.Engine(epoch=EPOCH, abort_grace_s=0.1, **bounds)
    made.set_local_device(0, 0)
    made.set_rank_name(0, "left/0 rank 0")
    made.set_rank_name(1, "right/0 rank 1")
    _native.set_engine(made)
    yield made
    _native.set_engine(None)
    made.close(5.0)


def read(stream: socket.socket, count: int) -> bytes:
    """Exactly as many bytes."""
    data = b""
    while len(data) < count:
        part = stream.recv(count - len(data))
        assert part, "the other end closed the stream"
        data += part
    return data


def header(nbytes: int, **changes: Any) -> bytes:
    """The header that a well-behaved peer sends."""
    fields: dict[str, Any] = dict(
        magic=MAGIC, version=_native.protocol_version(), size=HEADER.size, type=1, index=0, epoch=EPOCH,
        program=PROGRAM, occurrence=0, wire=WIRE, nbytes=nbytes, source=1, destination=0, text=b"psum/data test",
    )  # fmt: skip
    fields.update(changes)
    return HEADER.pack(*fields.values())


def swap(x: jax.Array, chain: jax.Array, plan: int = PLAN, index: int = 0) -> tuple[jax.Array, jax.Array]:
    """Sends `x`, receives as much: one exchange with its start and done."""
    names = dict(plan=np.int64(plan), program=np.int64(PROGRAM), index=np.int64(index))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    chain, ticket, y = jax.ffi.ffi_call("hetccl_exchange_start", (TOKEN, TOKEN, like), has_side_effect=True)(
        chain, x, **names
    )
    chain, y = jax.ffi.ffi_call(
        "hetccl_exchange_done", (TOKEN, like), has_side_effect=True, input_output_aliases={2: 1}
    )(chain, ticket, y, x, **names)
    return chain, y


def check(chain: jax.Array, y: jax.Array) -> jax.Array:
    like = jax.ShapeDtypeStruct(y.shape, y.dtype)
    call = jax.ffi.ffi_call("hetccl_check", like, has_side_effect=True, input_output_aliases={1: 0})
    return call(chain, y)


def empty_chain() -> jax.Array:
    return jnp.zeros((4,), jnp.uint32)


@jax.jit
def swap_and_check(x: jax.Array) -> jax.Array:
    return check(*swap(x, empty_chain()))


@jax.jit
def swap_only(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return swap(x, empty_chain())


def add_plan(engine: _native.Engine, nbytes: int, plan: int = PLAN) -> None:
    ranges = [(1, 0, 0, nbytes)]
    engine.add_plan(plan, "psum/data test", WIRE, 0, ranges, ranges)
