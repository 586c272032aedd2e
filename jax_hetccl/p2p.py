"""send and recv between ranks of clusters that run different programs.

Collectives over a spanning axis need the same program everywhere. A pipeline's stages, or prefill and decode, are
different programs; what connects them is a *stream*: a tag between two ranks, on which the n-th ``send`` meets the n-th
``recv``. Sends and receives of one program keep their order in the program, start before anything waits for one of
them, and are never dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_hetccl import _compat, exchange, plan, session
from jax_hetccl._compat import ir
from jax_hetccl._errors import ConfigError, UnsupportedError
from jax_hetccl._world import World
from jax_hetccl.decompose.common import unpacked

Peers = int | str | Sequence[int | None]


def send(x: Any, to: Peers, *, tag: str = "") -> jax.Array:
    """Sends ``x`` to ranks of other clusters, whose program receives it with :func:`recv`.

    Inside ``jit``: in a ``shard_map`` in which every mesh axis is manual, each device sends its own value; in a program
    of one device that device does. Algorithm: one message from each device directly to its peer; no local collective.

    The n-th send meets the n-th receive of the same tag between the same two ranks. Between one pair of ranks, streams
    and collectives that wait for each other must come in the same order on both sides.

    Gradients: the gradient with respect to ``x`` is received from ``to``, which sends it when it differentiates its
    :func:`recv`; both sides must differentiate. For that the returned zero must be part of what is differentiated here:
    a first stage's loss is the sum of its own losses and of what its sends return. How it is scaled does not matter. On
    a mesh whose axis spans, use ``check_vma=True``, or gradients of replicated operands are summed over all clusters.
    ``jax.checkpoint`` around it sends again in the backward pass; the peer must have the same around its receive.

    Args:
      x: array or pytree; leaves go in order. Shapes may differ from the receiver's if the number of elements does not.
      to: a world rank; or ranks, one for each device of the mesh in the mesh's order (None: that device takes no part);
        or a cluster's name, whose ranks are taken position by position.
      tag: names the stream, where there are several between two ranks.

    Returns:
      A float32 zero that exists once ``x`` has been sent; it need not be used.

    Raises:
      ConfigError: while tracing: ``to`` names an unknown rank, one of the own cluster, or not one for each device.
      UnsupportedError: in a program of several devices outside of a fully manual ``shard_map``.
      jax.errors.JaxRuntimeError: at run time, as for ``psum``; if the receiver expects another dtype or size the error
        shows both sides.

    Example:
      A pipeline of two stages, in the clusters "left" and "right" of one device each::

        def first(params, x):                           # the program of the cluster left
            return hetccl.send(jnp.tanh(x @ params), to="right")

        def last(params, like, y):                      # the program of the cluster right
            h = hetccl.recv(like, source="left")
            return jnp.mean((h @ params - y) ** 2)

        grads = jax.jit(jax.grad(first))(params, x)                             # left
        loss, (grads, _) = jax.jit(                                             # right
            jax.value_and_grad(last, argnums=(0, 1)))(params, like, y)
    """
    tokens = [_send_leaf(leaf, to, tag) for leaf in jax.tree.leaves(x)]
    return functools.reduce(jnp.add, tokens, jnp.zeros((), jnp.float32))


def recv(like: Any, source: Peers, *, tag: str = "") -> Any:
    """Receives what ranks of another cluster :func:`send`.

    Gradients: differentiating sends the cotangent back to ``source`` and gives zeros for ``like``. JAX only does so if
    ``like`` is one of the things differentiated: make it an argument in ``argnums`` too.

    Args:
      like: array, pytree of arrays, or ``jax.ShapeDtypeStruct``: shapes and dtypes of what comes; values do not matter.
      source: as ``to`` of :func:`send`. Devices with None get zeros.
      tag: names the stream.

    Returns:
      What the peers sent, varying over the mesh.

    Raises:
      As :func:`send`.

    Example:
      >>> cache = hetccl.recv(jax.ShapeDtypeStruct((8, 128), jnp.bfloat16), source="prefill", tag="cache")
    """
    return jax.tree.map(lambda leaf: _recv_leaf(leaf, source, tag), like)


def _send_leaf(x: Any, to: Peers, tag: str) -> jax.Array:
    peers = _peers("send", "to", to)
    x = _vary(_array("send", x))
    if x.size == 0:
        return jnp.zeros((), jnp.float32)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _send(peers, tag, x.astype(unpacked(np.dtype(x.dtype))))
    return _bind_send(x.astype(unpacked(np.dtype(x.dtype))), peers=peers, stream=_stream(tag))


def _recv_leaf(like: Any, source: Peers, tag: str) -> jax.Array:
    peers = _peers("recv", "source", source)
    like = _vary(_array("recv", like))
    if like.size == 0:
        return like
    wire = like.astype(unpacked(np.dtype(like.dtype)))
    if jnp.issubdtype(like.dtype, jnp.inexact):
        received: Any = _recv(peers, tag, wire)
        return received.astype(like.dtype)
    return _bind_recv(wire, peers=peers, stream=_stream(tag)).astype(like.dtype)


def _array(op: str, x: Any) -> jax.Array:
    if isinstance(x, jax.ShapeDtypeStruct):
        x = jnp.zeros(x.shape, x.dtype)
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        raise UnsupportedError(f"hetccl.{op} of {x.dtype}: send its data, such as jax.random.key_data(key)")
    return x


def _vary(x: jax.Array) -> jax.Array:
    """The value as one of each device's own. Its gradient is summed over the cluster's devices only."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    missing = tuple(a for a in manual if a not in _compat.varying_axes(x)) if _compat.checks_vma() else ()
    with _compat.local():
        return lax.pcast(x, missing, to="varying") if missing else x


# --- who talks to whom ---


def _peers(op: str, argument: str, peers: Peers) -> tuple[int | None, ...]:
    """The peer of each device of the mesh, checked."""
    world, mesh = session.hooks().world, jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and frozenset(mesh.manual_axes) != frozenset(mesh.axis_names):
        raise UnsupportedError(_where(op))
    devices = mesh.size if mesh.manual_axes else 1
    if isinstance(peers, str):
        names = [c.name for c in world.clusters]
        if peers not in names:
            raise ConfigError(f"hetccl.{op}: {argument}={peers!r} is no cluster; the clusters are {', '.join(names)}")
        ranks: list[int | None] = list(world.ranks_of_cluster(names.index(peers)))
    else:
        given = [peers] if isinstance(peers, (int, np.integer)) else list(peers)
        ranks = [None if r is None else int(r) for r in given]
    shown = f"hetccl.{op}: {argument}={peers!r}"
    if len(ranks) != devices:
        raise ConfigError(
            f"{shown} names {len(ranks)} rank(s), but {devices} device(s) take part here; give one rank for each device "
            "in the order of the mesh, None for devices that take no part"
        )
    taken = [r for r in ranks if r is not None]
    for rank in taken:
        _check_rank(world, shown, rank)
    if len(set(taken)) != len(taken):
        raise ConfigError(f"{shown} names a rank twice; each device needs a peer of its own")
    return tuple(ranks)


def _check_rank(world: World, shown: str, rank: int) -> None:
    if not 0 <= rank < world.size:
        raise ConfigError(f"{shown}: there is no rank {rank}; the world has the ranks 0 to {world.size - 1}")
    if world.cluster_of_rank(rank) == world.cluster:
        raise ConfigError(
            f"{shown}: {world.rank_name(rank)} belongs to this cluster; send and recv connect different clusters. Inside "
            "a cluster use lax.ppermute."
        )


def _where(op: str) -> str:
    return (
        f"hetccl.{op} works in a shard_map in which all axes of the mesh are manual, or in a jit over one device; wrap it "
        "in jax.shard_map over all axes"
    )


# --- primitives ---


def _stream(tag: str, *more: str) -> tuple[str, ...]:
    return ("p2p", tag, *more)


def _spec(op: str, at: _compat.Placed, peers: Sequence[int | None], stream: tuple[str, ...]) -> exchange.Exchange:
    """The exchange of a send or recv."""
    hooks = session.hooks()
    if not at.supported:
        raise UnsupportedError(_where(op))
    devices = list(hooks.agreement.devices(at.mesh).flat) if at.in_mesh else [at.device]
    elements = math.prod(at.shape)
    nbytes = elements * at.dtype.itemsize
    ranges = [() if peer is None else (plan.Range(peer, 0, 0, nbytes),) for peer in peers]
    parts = [plan.RankPlan(sends=r) if op == "send" else plan.RankPlan(recvs=r) for r in ranges]
    ranks = [hooks.world.rank_of_device(d) for d in devices]
    where = f" {at.name_stack}" if at.name_stack else ""
    shape = ",".join(map(str, at.shape))
    return exchange.Exchange(
        plan=dict(zip(ranks, parts, strict=True)),
        sends=int(op == "send"),
        recvs=int(op == "recv"),
        wire=(stream, at.dtype.name, elements),
        text=f"{op}/{'.'.join(filter(None, stream))} {at.dtype.name}[{shape}]{where}",
        payload=nbytes,
        group="",
        stream=stream,
    )


def _lower_send(at: _compat.Placed, x: ir.Value, *, peers: tuple[int | None, ...], stream: tuple[str, ...]) -> ir.Value:
    exchange.emit(session.hooks().registry, _spec("send", at, peers, stream), [x], [])
    return _compat.constant(np.float32(0))


def _lower_recv(
    at: _compat.Placed, like: ir.Value, *, peers: tuple[int | None, ...], stream: tuple[str, ...]
) -> ir.Value:
    (received,) = exchange.emit(session.hooks().registry, _spec("recv", at, peers, stream), [], [like.type])
    comes = np.asarray([peer is not None for peer in peers])
    if comes.all():
        return received
    return at.pick(comes, received, _compat.constant(np.zeros(at.shape, at.dtype)), tuple(at.mesh.axis_names))


_bind_send = _compat.communicating_primitive("hetccl_send", scalar=True, lower=_lower_send)
_bind_recv = _compat.communicating_primitive("hetccl_recv", scalar=False, lower=_lower_recv)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(peers: tuple[int | None, ...], tag: str, x: jax.Array) -> jax.Array:
    return _bind_send(x, peers=peers, stream=_stream(tag))


def _send_forward(peers: tuple[int | None, ...], tag: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _bind_send(x, peers=peers, stream=_stream(tag)), x


def _send_backward(peers: tuple[int | None, ...], tag: str, x: jax.Array, _: jax.Array) -> tuple[jax.Array]:
    # The gradients have a stream of their own: they may be interleaved differently on the two sides.
    return (_bind_recv(x, peers=peers, stream=_stream(tag, "grad")),)


_send.defvjp(_send_forward, _send_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _recv(peers: tuple[int | None, ...], tag: str, like: jax.Array) -> jax.Array:
    return _bind_recv(like, peers=peers, stream=_stream(tag))


def _recv_forward(peers: tuple[int | None, ...], tag: str, like: jax.Array) -> tuple[jax.Array, None]:
    return _bind_recv(like, peers=peers, stream=_stream(tag)), None


def _recv_backward(peers: tuple[int | None, ...], tag: str, _: None, ct: jax.Array) -> tuple[jax.Array]:
    _bind_send(ct, peers=peers, stream=_stream(tag, "grad"))
    return (lax.full_like(ct, 0),)


_recv.defvjp(_recv_forward, _recv_backward)
