"""The one operation between clusters: send these byte ranges, receive those.

A decomposition emits an exchange as a single marker operation (:func:`emit`); the ordering pass
(:mod:`jax_hetccl.ordering`) later replaces the markers of a whole program by ``hetccl_exchange_start`` and
``hetccl_exchange_done``, buckets included. What the marker stands for is an :class:`Exchange`, kept in a
:class:`Registry` under a number that is part of the program and the same in every process of a cluster: it says
nothing about the rank, which the native handler looks up by device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Sequence

from jax_hetccl import plan as plans
from jax_hetccl._compat import custom_call, ir

MARKER = "hetccl_exchange"
START, DONE = "hetccl_exchange_start", "hetccl_exchange_done"
STATUS, CHECK = "hetccl_status", "hetccl_check"
CHAIN_WORDS = 4


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange of a lowered program.

    Attributes:
      plan: what every rank of the own cluster sends and receives.
      sends: number of buffers sent.
      recvs: number of buffers received.
      wire: what both sides must agree on, e.g. ``("psum", ("data",), "float32", 1024, "whole")``.
      text: for errors and profiles, e.g. ``psum/data f32[1024] train_step/grads``.
      payload: bytes of the operation's whole operand, the same in every cluster.
      group: exchanges of one group (ranks of one mesh) may share a bucket.
      stream: for an exchange between different programs, the name that both sides give it. It is matched by how
        often the stream was used between two ranks, not by its place in a program, and shares no bucket.
    """

    plan: plans.Plan
    sends: int
    recvs: int
    wire: tuple[object, ...]
    text: str
    payload: int
    group: str
    stream: tuple[object, ...] | None = None

    @property
    def program(self) -> int | None:
        """The program id of a stream, equal on both sides; None if that is the surrounding program's."""
        return None if self.stream is None else fingerprint(self.stream)

    @property
    def wire_id(self) -> int:
        """64 bits that are equal in all clusters exactly if they mean the same exchange."""
        return fingerprint(self.wire)

    @property
    def id(self) -> int:
        """64 bits that name this exchange within the cluster."""
        return fingerprint((self.wire, self.text, self.sends, self.recvs, sorted(self.plan.items())))


class Registry:
    """The exchanges of a world by their id. Thread-safe; grows with the number of distinct exchanges."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[int, Exchange] = {}

    def add(self, exchange: Exchange) -> int:
        """Keeps an exchange (again) and returns its id."""
        number = exchange.id
        with self._lock:
            self._by_id[number] = exchange
        return number

    def __getitem__(self, number: int) -> Exchange:
        with self._lock:
            return self._by_id[number]


def bucket(parts: Sequence[Exchange], places: Sequence[int]) -> Exchange:
    """Several exchanges as one: their buffers in order, one message to each peer.

    Args:
      parts: the exchanges. One of a stream stands alone and stays as it is.
      places: their places in program order, which both sides compare too: two exchanges of equal operands in another
        order are a mismatch then, and not a swap of values.

    Returns:
      The exchange that the program starts.
    """
    if parts[0].stream is not None:
        return parts[0]
    wire = ("bucket", *((at, p.wire) for at, p in zip(places, parts, strict=True)))
    if len(parts) == 1:
        return dataclasses.replace(parts[0], wire=wire)
    merged = plans.merge([(p.plan, p.sends, p.recvs) for p in parts])
    total = sum(p.payload for p in parts)
    return Exchange(
        plan=merged,
        sends=sum(p.sends for p in parts),
        recvs=sum(p.recvs for p in parts),
        wire=wire,
        text=f"{parts[0].text} and {len(parts) - 1} more, {total} bytes together",
        payload=total,
        group=parts[0].group,
    )


def emit(registry: Registry, exchange: Exchange, sends: Sequence[ir.Value], recvs: Sequence[ir.Type]) -> list[ir.Value]:
    """Emits the marker of an exchange at the current insertion point.

    Args:
      registry: of the world.
      exchange: what it stands for.
      sends: the buffers sent.
      recvs: types of the buffers received.

    Returns:
      The received buffers, then the sent ones. Bytes of the received ones that no rank sends are zero. What is
      computed from a sent value further on should take it from here: a compiler may compute the original again, fused
      with what follows and with other rounding (a fused multiply-add), and then differ from the bytes that were sent.
    """
    attributes = {"plan": i64(registry.add(exchange))}
    # Side effect: nothing may merge, drop or hoist it before the ordering pass has seen it.
    op = custom_call(MARKER, sends, [*recvs, *(v.type for v in sends)], attributes, side_effect=True)
    return list(op.results)


@dataclasses.dataclass(frozen=True)
class Started:
    """A started exchange in the program: its operation, the chain behind it, the ticket for its done, the receive
    buffers, and the sent buffers as the start leaves them."""

    op: ir.Operation
    chain: ir.Value
    ticket: ir.Value
    receives: list[ir.Value]
    sends: list[ir.Value]


def emit_start(
    spec: Exchange, chain: ir.Value, sends: Sequence[ir.Value], kept: Sequence[int], recvs: Sequence[ir.Type]
) -> Started:
    """Emits the start of an exchange.

    Args:
      spec: the exchange.
      chain: the latest value of the chain.
      sends: the buffers sent.
      kept: which of them pass through the start, in place. Everything that is computed from such a buffer afterwards
        takes it from there, so that it is the one that is being sent.
      recvs: types of the buffers received.

    Returns:
      The started exchange.
    """
    results = [chain_type(), chain_type(), *recvs, *(sends[i].type for i in kept)]
    # A buffer of its own for each chain would cost a GPU a copy.
    aliases = {0: 0, **{1 + i: 2 + len(recvs) + k for k, i in enumerate(kept)}}
    attributes = {"plan": i64(spec.id), "kept": i64(len(kept))}
    op = custom_call(START, [chain, *sends], results, attributes, side_effect=True, aliases=aliases)
    new_chain, ticket, *buffers = values(op)
    left = list(sends)
    for i, value in zip(kept, buffers[len(recvs) :], strict=True):
        left[i] = value
    return Started(op, new_chain, ticket, buffers[: len(recvs)], left)


def emit_done(spec: Exchange, chain: ir.Value, started: Started) -> tuple[ir.Operation, ir.Value, list[ir.Value]]:
    """Emits the end of an exchange.

    The sent buffers are operands too, not aliased: XLA may neither use their memory for something else while they are
    being sent nor put a copy in their place.

    Returns:
      The operation, the chain behind it and the filled receive buffers.
    """
    aliases = {0: 0, **{2 + i: 1 + i for i in range(len(started.receives))}}
    results = [chain_type(), *(v.type for v in started.receives)]
    operands = [chain, started.ticket, *started.receives, *started.sends]
    op = custom_call(DONE, operands, results, {"plan": i64(spec.id)}, side_effect=True, aliases=aliases)
    new_chain, *buffers = values(op)
    return op, new_chain, buffers


def emit_status(chain: ir.Value) -> ir.Value:
    """Emits an operation that marks the chain as failed if the world has failed (for exchanges in loop predicates,
    whose chain cannot leave the predicate)."""
    return custom_call(STATUS, [chain], [chain_type()], {}, side_effect=True, aliases={0: 0}).result


def emit_check(flag: ir.Value, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Emits the check that raises the world's first error if ``flag`` (u32[1]) is set; the values pass through."""
    aliases = {1 + i: i for i in range(len(values))}
    op = custom_call(CHECK, [flag, *values], [v.type for v in values], {}, side_effect=True, aliases=aliases)
    return list(op.results)


def values(op: ir.Operation) -> list[ir.Value]:
    """An operation's results."""
    return list(op.results)


def chain_type() -> ir.Type:
    """The chain and a ticket: ``u32[4]``, the last word of a chain says whether an exchange before it failed."""
    return ir.RankedTensorType.get([CHAIN_WORDS], ir.IntegerType.get_unsigned(32))


def i64(number: int) -> ir.Attribute:
    """A 64-bit attribute that holds the bit pattern of an unsigned number."""
    signed = number - (1 << 64) if number >= 1 << 63 else number
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), signed)


def u64(attribute: ir.Attribute) -> int:
    """The unsigned number in an :func:`i64` attribute."""
    return ir.IntegerAttr(attribute).value % (1 << 64)


def fingerprint(value: object) -> int:
    """64 bits of a value's ``repr``: stable between processes, Python versions and runs."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")
