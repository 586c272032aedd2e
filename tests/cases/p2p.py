"""send and recv between the first two clusters, each running its own half. The halves assert what they got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from harness.case import BOTH, OFF, case
from harness.env import D, Env

S = "stage"
_ROWS = P(S)


class Side:
    """One cluster's half: a mesh of its own whose axis does not span, and its counterparts.

    With sizes that differ, the devices beyond the smaller cluster take no part.
    """

    def __init__(self, env: Env) -> None:
        self.env, self.left = env, env.first == 0
        self.pairs = min(env.sizes)
        self.devices = jax.devices()[: env.count]
        self.mesh = Mesh(np.array(self.devices), (S,), axis_types=(jax.sharding.AxisType.Auto,))
        other = env.sizes[0] if self.left else 0
        self.peers = [other + i if i < self.pairs else None for i in range(env.count)]

    def smap(self, f: Callable[..., Any], in_specs: Any = _ROWS, out_specs: Any = _ROWS) -> Callable[..., Any]:
        return jax.jit(jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=self.env.vma))

    def rows(self, of_left: bool, *shape: int, dtype: Any = np.float32) -> np.ndarray:
        """What each device of a side has: distinct, small multiples of 1/4, as ``[devices here, *shape]``."""
        values = np.arange(self.env.count * np.prod(shape, dtype=int)).reshape(self.env.count, *shape)
        return np.asarray(
            jnp.asarray((values % 13 - 4) / (4 if dtype == np.float32 else 1) + 5 * of_left).astype(dtype)
        )

    def put(self, value: Any, spec: Any = _ROWS) -> jax.Array:
        return jax.device_put(value, NamedSharding(self.mesh, spec))

    def arrived(self, got: Any, sent: np.ndarray) -> None:
        """What the peers sent is there, and zeros where there is no peer."""
        got = np.asarray(got)
        _same(got[: self.pairs], sent[: self.pairs])
        _same(got[self.pairs :], np.zeros_like(got[self.pairs :]))


def _same(got: Any, wanted: Any) -> None:
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.dtype == wanted.dtype, (got.dtype, wanted.dtype)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert got.tobytes() == wanted.tobytes(), (got, wanted)


def _close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=2e-5, atol=1e-6)


DONE: Sequence[np.int32] = [np.int32(0)]
_DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "bool", "int4", "complex64", "float8_e5m2")


@case("p2p", vma=BOTH, table={name: {"dtype": name} for name in _DTYPES})
def one_way(env: Env) -> Any:
    """Left sends, right receives, bit for bit."""
    from jax_hetccl import recv, send

    side, dtype = Side(env), jnp.dtype(env.params["dtype"])
    sent = side.rows(True, 3, 5, dtype=dtype)
    if side.left:
        token = side.smap(lambda x: send(x, to=side.peers)[None])(side.put(sent))
        _same(token, np.zeros(env.count, np.float32))
    else:
        like = jax.ShapeDtypeStruct((1, 3, 5), dtype)
        side.arrived(side.smap(lambda: recv(like, source=side.peers), (), P(S))(), sent)
    return DONE


@case("p2p", vma=BOTH)
def both_ways(env: Env) -> Any:
    """16 MB in each direction at once: neither side waits for the end of its send before it receives."""
    from jax_hetccl import recv, send

    side = Side(env)
    mine = np.broadcast_to(side.rows(side.left, 1), (env.count, 4 << 20))
    theirs = np.broadcast_to(side.rows(not side.left, 1), (env.count, 4 << 20))

    def f(x: jax.Array) -> Any:
        return send(x, to=side.peers)[None], recv(x, source=side.peers)

    for _ in range(2):
        side.arrived(side.smap(f)(side.put(mine))[1], theirs)
    return DONE


@case("p2p", vma=OFF)
def trees_and_empty(env: Env) -> Any:
    """A pytree's leaves go in order; nothing crosses for an empty array; shapes may differ where sizes do not."""
    from jax_hetccl import recv, send

    side = Side(env)
    a, b = side.rows(True, 4, dtype=np.int32), side.rows(True, 2, 3)
    if side.left:
        tree = {"a": side.put(a), "b": side.put(b), "none": side.put(np.zeros((env.count, 0), np.float32))}
        side.smap(lambda t: send(t, to=side.peers)[None])(tree)
    else:
        like = {"a": jax.ShapeDtypeStruct((1, 4), np.int32), "b": jax.ShapeDtypeStruct((1, 6), np.float32),
                "none": jax.ShapeDtypeStruct((1, 0), np.float32)}  # fmt: skip
        got = side.smap(lambda: recv(like, source=side.peers), (), P(S))()
        side.arrived(got["a"], a)
        side.arrived(got["b"], b.reshape(env.count, 6))
        assert got["none"].shape == (env.count, 0)
    return DONE


@case("p2p", vma=OFF)
def order_within_a_tag(env: Env) -> Any:
    """The first send's value exists last; the receiver still gets them in the order written."""
    from jax_hetccl import recv, send

    side, x = Side(env), Side(env).rows(True, 64)

    def sender(x: jax.Array) -> jax.Array:
        late, _ = lax.scan(lambda c, _: (jnp.sin(c) * 1.5, None), x, None, length=200)
        send(jnp.round(late) * 0 + 1, to=side.peers)
        send(x, to=side.peers)
        lax.scan(lambda c, t: (c + send(x * t, to=side.peers), None), 0.0, jnp.arange(3.0))
        send(x * 7, to=side.peers)
        return x

    def receiver() -> Any:
        like = jax.ShapeDtypeStruct((1, 64), np.float32)
        a, b = recv(like, source=side.peers), recv(like, source=side.peers)
        c = lax.scan(lambda c, _: (c + 1, recv(like, source=side.peers)), 0.0, None, length=3)[1]
        return a, b, c, recv(like, source=side.peers)

    if side.left:
        side.smap(sender)(side.put(x))
    else:
        a, b, c, d = side.smap(receiver, (), (P(S), P(S), P(None, S), P(S)))()
        side.arrived(a, np.ones_like(x))
        side.arrived(b, x)
        for t in range(3):
            side.arrived(c[t], x * np.float32(t))
        side.arrived(d, x * 7)
    return DONE


@case("p2p", vma=OFF)
def tags_in_another_order(env: Env) -> Any:
    """Tags are streams of their own: received in another order than sent."""
    from jax_hetccl import recv, send

    side, x = Side(env), Side(env).rows(True, 8)
    if side.left:
        side.smap(lambda x: send(x, to=side.peers, tag="a") + send(x * 2, to=side.peers, tag="b")[None])(side.put(x))
    else:
        like = jax.ShapeDtypeStruct((1, 8), np.float32)

        def f() -> Any:
            b = recv(like, source=side.peers, tag="b")
            return recv(like, source=side.peers, tag="a"), b

        a, b = side.smap(f, (), P(S))()
        side.arrived(a, x)
        side.arrived(b, x * 2)
    return DONE


@case("p2p", vma=OFF)
def programs_not_waited_for(env: Env) -> Any:
    """Twelve programs in a row, every other one with much to do before it sends: each receive gets its own value."""
    from jax_hetccl import recv, send

    side, number = Side(env), 12

    def sender(x: jax.Array, n: jax.Array) -> jax.Array:
        late = lax.fori_loop(0, n[0], lambda _, a: jnp.sin(a @ a), jnp.zeros((48, 48)))
        return send(x + late[0, 0] * 0, to=side.peers)[None]

    values = [side.rows(True, 3) + np.float32(i) for i in range(number)]
    if side.left:
        run = side.smap(sender, (P(S), P()))
        placed = [(side.put(v), side.put(np.asarray([200 * (i % 2)]), P())) for i, v in enumerate(values)]
        jax.block_until_ready([run(*a) for a in placed])
    else:
        run = side.smap(lambda x: recv(x, source=side.peers))
        placed = [side.put(v * 0) for v in values]
        for got, sent in zip([run(x) for x in placed], values, strict=True):
            side.arrived(got, sent)
    return DONE


@case("p2p", vma=OFF)
def unused_is_not_dropped(env: Env) -> Any:
    """Sends and receives whose results nobody uses: in inner functions, branches, loops and remat."""
    from jax_hetccl import recv, send

    side = Side(env)
    like = jax.ShapeDtypeStruct((1, 3), np.float32)

    def talk(x: jax.Array, t: Any) -> None:
        # Of a checkpoint that neither reads nor returns anything JAX 0.10 drops even the effects: let it read x.
        send(x * t, to=side.peers) if side.left else recv(x, source=side.peers)

    def f(x: jax.Array, k: jax.Array) -> jax.Array:
        jax.jit(lambda x: talk(x, 1))(x)
        lax.cond(k > 0, lambda: talk(x, 2), lambda: None)
        jax.checkpoint(lambda x: talk(x, 3))(x)
        lax.fori_loop(0, 2, lambda i, c: (talk(x, 4), c)[1], 0)
        return x if side.left else recv(like, source=side.peers)

    x = side.rows(True, 3)
    got = side.smap(f, (P(S), P()))(side.put(x), np.int32(1))
    if side.left:
        side.smap(lambda x: send(x * 9, to=side.peers)[None])(side.put(x))
    else:
        side.arrived(got, x * 9)
    return DONE


@case("p2p", vma=OFF)
def one_device(env: Env) -> Any:
    """A plain jit over one device, whichever it is; also eagerly."""
    from jax_hetccl import recv, send

    side = Side(env)
    for i in range(side.pairs):
        peer = side.peers[i]
        x = jax.device_put(np.arange(6, dtype=np.float32) + i, side.devices[i])
        if side.left:
            jax.jit(lambda x, p=peer: send(x * 2, to=p))(x)
            send(x * 3, to=peer)
        else:
            got = jax.jit(lambda x, p=peer: recv(x, source=p))(x)
            _same(got, (np.arange(6, dtype=np.float32) + i) * 2)
            assert got.devices() == {side.devices[i]}
            _same(recv(x, source=peer), (np.arange(6, dtype=np.float32) + i) * 3)
    return DONE


@case("p2p-processes", vma=OFF)
def processes(env: Env) -> Any:
    """A mesh over several processes: every process lowers the program of its whole cluster."""
    from jax_hetccl import recv, send

    side = Side(env)
    value = np.arange(env.count * 5, dtype=np.float32).reshape(env.count, 5)
    here = NamedSharding(side.mesh, P(S))
    x = jax.make_array_from_callback(value.shape, here, lambda at: value[at])

    def f(x: jax.Array) -> Any:
        token = send(x * (2 if side.left else 3), to=side.peers)
        return recv(x, source=side.peers), token[None]

    for _ in range(3):
        got, _ = side.smap(f)(x)
        for shard in got.addressable_shards:
            row = shard.index[0].start or 0
            _same(shard.data, value[row : row + 1] * np.float32((3 if side.left else 2) * (row < side.pairs)))
    return DONE


@case("p2p-even", vma=OFF)
def by_name(env: Env) -> Any:
    """A cluster's name stands for its ranks, position by position."""
    from jax_hetccl import recv, send

    side, x = Side(env), Side(env).rows(True, 4)
    if side.left:
        side.smap(lambda x: send(x, to="right")[None])(side.put(x))
    else:
        side.arrived(side.smap(lambda x: recv(x, source="left"))(side.put(x * 0)), x)
    return DONE


@case("p2p-even", vma=OFF)
def order_of_the_mesh(env: Env) -> Any:
    """Peers are in the order of the mesh, also where another mesh of the same shape has another order."""
    from jax_hetccl import recv, send

    side, x = Side(env), Side(env).rows(True, 4)
    turned = Side(env)
    turned.mesh = Mesh(np.array(side.devices[::-1]), (S,), axis_types=(jax.sharding.AxisType.Auto,))
    for at in (side, turned, side, turned):
        if side.left:
            at.smap(lambda x: send(x, to=side.peers)[None])(at.put(x))
        else:
            got = at.smap(lambda x: recv(x, source=side.peers))(at.put(x * 0))
            side.arrived(got, x if at is side else x[::-1])
    return DONE


@case("p2p", vma=BOTH)
def beside_collectives(env: Env) -> Any:
    """Programs that differ in their sends agree on their collectives; both use the same pairs of ranks."""
    from jax_hetccl import recv, send

    side, x = Side(env), Side(env).rows(True, 4)

    def f(x: jax.Array) -> Any:
        a = lax.psum(x[0, 0] * 0 + 1, D)
        if side.left:
            send(x, to=side.peers)
            send(x + 1, to=side.peers, tag="more")
            y = x
        else:
            y = recv(x, source=side.peers) + recv(x, source=side.peers, tag="more")
        return a, y, lax.pmax(a * 2, D)

    mapped = jax.shard_map(f, mesh=env.mesh, in_specs=P(D), out_specs=(P(), P(D), P()), check_vma=env.vma)
    first = jax.device_put(x if side.left else x * 0, NamedSharding(env.mesh, P(D)))
    for _ in range(3):
        a, y, b = jax.jit(mapped)(first)
        assert (float(a), float(b)) == (env.size, 2 * env.size)
        if not side.left:
            side.arrived(y, x + x + 1)
    return DONE


@case("p2p", vma=OFF)
def batched(env: Env) -> Any:
    """Under vmap one message carries the whole batch."""
    from jax_hetccl import recv, send

    side, x = Side(env), Side(env).rows(True, 3, 4)
    if side.left:
        side.smap(lambda x: jax.vmap(lambda r: send(r, to=side.peers), in_axes=2)(x).sum()[None])(side.put(x))
    else:
        like = side.put(np.zeros((env.count, 4, 3), np.float32))
        got = side.smap(lambda y: jax.vmap(lambda r: recv(r, source=side.peers), in_axes=1)(y)[None])(like)
        side.arrived(got[:, :, 0], x.transpose(0, 2, 1))
    return DONE


# --- gradients: the same two layers on one device are the judge ---

_RNG = np.random.default_rng(3)
_W1, _W2 = (_RNG.standard_normal(s).astype(np.float32) for s in ((5, 7), (7, 2)))


def _model(w1: Any, w2: Any, x: Any, y: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ w1) @ w2 - y) ** 2)


def _batch(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((8, 4, 5)), rng.standard_normal((8, 4, 2))
    return x[:n].astype(np.float32), y[:n].astype(np.float32)


@case("p2p", vma=BOTH, table={"plain": {"wrap": "none"}, "remat": {"wrap": "remat"}})
def gradients(env: Env) -> Any:
    """Two stages on two clusters: every pair of devices has its own rows, each side its own replica of its weights."""
    from jax_hetccl import recv, send

    side, n = Side(env), env.count
    x, y = _batch(n)
    wrap = jax.checkpoint if env.params["wrap"] == "remat" else lambda f: f

    def first(w: jax.Array, x: jax.Array) -> jax.Array:
        return wrap(lambda w, x: send(jnp.tanh(x @ w), to=side.peers))(w, x)

    def last(w: jax.Array, like: jax.Array, y: jax.Array) -> jax.Array:
        return wrap(lambda w, like: jnp.mean((recv(like, source=side.peers) @ w - y) ** 2))(w, like)

    wanted = [jax.value_and_grad(_model, (0, 1))(_W1, _W2, x[i], y[i]) for i in range(side.pairs)]
    each = side.put(np.broadcast_to(_W1 if side.left else _W2, (n, *(_W1 if side.left else _W2).shape)))
    if side.left:
        f = side.smap(lambda w, x: jax.grad(first)(w[0], x[0])[None], (P(S), P(S)), P(S))
        got = f(each, side.put(x))
        for i, (_, grads) in enumerate(wanted):
            _close(got[i], grads[0])
        _close(got[side.pairs :], got[side.pairs :] * 0)
    else:
        like = side.put(np.zeros((n, 4, 7), np.float32))

        def step(w: jax.Array, like: jax.Array, y: jax.Array) -> Any:
            loss, (dw, dlike) = jax.value_and_grad(last, (0, 1))(w[0], like[0], y[0])
            return loss[None], dw[None], dlike[None]

        loss, dw, dlike = side.smap(step, (P(S), P(S), P(S)))(each, like, side.put(y))
        for i, (value, grads) in enumerate(wanted):
            _close(loss[i], value)
            _close(dw[i], grads[1])
        _same(dlike, np.zeros((n, 4, 7), np.float32))
    return DONE


@case("p2p", vma=BOTH)
def gradients_of_replicated(env: Env) -> Any:
    """Weights that all devices of a side share: their gradient is the sum over that side's devices."""
    from jax_hetccl import recv, send

    side, n = Side(env), env.count
    x, y = _batch(n)
    grads = [jax.grad(_model, (0, 1))(_W1, _W2, x[i], y[i]) for i in range(side.pairs)]
    if side.left:
        f = side.smap(lambda w, x: send(jnp.tanh(x[0] @ w), to=side.peers)[None], (P(), P(S)))
        got = jax.jit(jax.grad(lambda w: jnp.sum(f(w, side.put(x)))))(side.put(_W1, P()))
        _close(got, sum(g[0] for g in grads))
    else:

        def last(w: jax.Array, like: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean((recv(like[0], source=side.peers) @ w - y[0]) ** 2)[None]

        f = side.smap(last, (P(), P(S), P(S)))
        like = side.put(np.zeros((n, 4, 7), np.float32))
        real = jnp.arange(n) < side.pairs
        loss = lambda w, like: jnp.sum(jnp.where(real, f(w, like, side.put(y)), 0))  # noqa: E731
        got, _ = jax.jit(jax.grad(loss, (0, 1)))(side.put(_W2, P()), like)
        _close(got, sum(g[1] for g in grads))
    return DONE


@case("p2p", vma=OFF)
def gradients_of_microbatches(env: Env) -> Any:
    """A scan over microbatches, forward and backward."""
    from jax_hetccl import recv, send

    side = Side(env)
    x, y = _batch(6)
    device = side.devices[0]
    loss, grads = jax.value_and_grad(lambda a, b: sum(_model(a, b, *z) for z in zip(x, y, strict=True)), (0, 1))(
        _W1, _W2
    )
    if side.left:

        def first(w: jax.Array) -> jax.Array:
            def body(c: jax.Array, x: jax.Array) -> Any:
                send(jnp.sum(x @ w), to=side.peers[0], tag="unused")
                return c + send(jnp.tanh(x @ w), to=side.peers[0]), None

            return lax.scan(body, 0.0, jnp.asarray(x))[0]

        _close(jax.jit(jax.grad(first))(jax.device_put(_W1, device)), grads[0])
    else:

        def last(w: jax.Array, like: jax.Array) -> Any:
            def body(c: jax.Array, y: jax.Array) -> Any:
                # `like` is the same in every step: the receive must stay in the loop all the same.
                told = recv(jax.ShapeDtypeStruct((), np.float32), source=side.peers[0], tag="unused")
                return c + jnp.mean((recv(like, source=side.peers[0]) @ w - y) ** 2), told

            return lax.scan(body, 0.0, jnp.asarray(y))

        step = jax.jit(jax.value_and_grad(last, (0, 1), has_aux=True))
        (got, told), (dw, _) = step(jax.device_put(_W2, device), jnp.zeros((4, 7)))
        _close(got, loss)
        _close(dw, grads[1])
        _close(told, [jnp.sum(z @ _W1) for z in x])
    return DONE


# --- what is refused, before anything moves; and what fails ---


@case("p2p", vma=OFF)
def refused(env: Env) -> Any:
    """Wrong peers and wrong places are errors while tracing."""
    import jax_hetccl
    from jax_hetccl import recv, send

    side, x = Side(env), Side(env).put(Side(env).rows(True, 2))
    mine = env.first
    wrong: list[tuple[Any, str]] = [
        ([mine] * env.count, "belongs to this cluster"),
        ([99] * env.count, "no rank 99"),
        ([*side.peers, None], "one rank for each device"),
        ("nobody", "no cluster"),
        ("left" if side.left else "right", "belongs to this cluster"),
    ]
    if side.pairs > 1:
        wrong.append(([side.peers[0]] * env.count, "twice"))
    for peers, says in wrong:
        for f in (lambda x, p=peers: send(x, to=p)[None], lambda x, p=peers: recv(x, source=p)):
            try:
                side.smap(f)(x)
            except jax_hetccl.ConfigError as error:
                if peers in ("left", "right") and env.sizes[0] != env.sizes[1]:
                    continue
                assert says in str(error), error
            else:
                raise AssertionError(f"{peers} was accepted")
    if env.count > 1:
        try:
            jax.jit(lambda x: send(x, to=side.peers[0]))(x)
        except jax_hetccl.UnsupportedError as error:
            assert "shard_map" in str(error), error
        else:
            raise AssertionError("a program of several devices was accepted outside of shard_map")
    return DONE


@case("p2p-fails", vma=OFF, table={"size": {"n": 4, "dtype": "float32"}, "dtype": {"n": 8, "dtype": "int32"}})
def mismatch(env: Env) -> Any:
    """The two sides do not mean the same."""
    from jax_hetccl import recv, send

    side = Side(env)
    x = jax.device_put(np.ones(8, np.float32), side.devices[0])
    like = jax.ShapeDtypeStruct((env.params["n"],), env.params["dtype"])
    if side.left:
        return jax.jit(lambda x: (x, send(x, to=side.peers[0], tag="act")))(x)[1]
    return jax.jit(lambda x: (x, recv(like, source=side.peers[0], tag="act")))(x)[1]


@case("p2p-fails", vma=OFF)
def waits(env: Env) -> Any:
    """A receive that nobody serves, in a plain jit over one device."""
    from jax_hetccl import recv

    side = Side(env)
    x = jax.device_put(np.ones(8, np.float32), side.devices[0])
    return jax.jit(lambda x: recv(x, source=side.peers[0]))(x)


@case("p2p-fails", vma=OFF)
def nothing(env: Env) -> Any:
    """Warms the harness up."""
    return DONE
