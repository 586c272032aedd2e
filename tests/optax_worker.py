"""One process of a world that trains with hetccl.optax; runs scenarios by name (see test_optax.py and sync_worker.py)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sync_worker
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sync_worker import CLUSTERS, DEVICES, MESH, SPECS, C, N, expect, mesh_of, put, raises

import jax_hetccl as hetccl

FORMATS = ("bfloat16", "float8_e4m3fn", "int8")
SHAPES = {k: sync_worker.SHAPES[k] for k in ("w", "b", "s", "z")} | {"row": (3, 2, 70)}
SPECS = {**SPECS, "row": P()}
WEIGHTS = [np.float32(w) for w in (3, 4.25, 7.125)]
Tree = dict[str, np.ndarray]


def gradient(cluster: int, step: int = 0, dtype: Any = np.float32) -> Tree:
    """Values of 8 bits, whose products with the weights are exact, over a wide range."""
    rng = np.random.default_rng((cluster, step))
    made = {
        k: rng.standard_normal(s) * np.exp2(rng.integers(-20, 20, s[:1] + (1,) * (len(s) - 1)))
        for k, s in SHAPES.items()
    }
    return {k: np.asarray(v).astype(jnp.bfloat16).astype(dtype) for k, v in made.items()}


def rounded(x: np.ndarray, form: str) -> np.ndarray:
    """What a format makes of a float32 array: numpy's own way."""
    if form == "bfloat16" or not x.size:
        return x.astype(jnp.bfloat16).astype(np.float32)
    axes: tuple[int, ...] = ()
    while len(axes) < x.ndim and (not axes or np.prod([x.shape[a] for a in axes]) < 64):
        axes = (x.ndim - 1 - len(axes), *axes)
    largest = np.max(np.abs(x), axis=axes, keepdims=True).astype(np.float64)
    limit = {"int8": 127.0, "float8_e4m3fn": 448.0}[form]
    scale = np.exp2(np.ceil(np.log2(np.maximum(largest, 1e-30) / limit)))
    scaled = (x / scale).astype(np.float32)
    wire = np.rint(scaled).astype(np.int8) if form == "int8" else scaled.astype(jnp.float8_e4m3fn)
    return (wire.astype(np.float64) * scale).astype(np.float32)


class Oracle:
    """The mean of all clusters' gradients in a format, with what each of them keeps."""

    def __init__(self, form: str, feedback: bool = True):
        self.form, self.feedback = form, feedback
        self.kept = [{k: np.zeros(s, np.float32) for k, s in SHAPES.items()} for _ in range(CLUSTERS)]

    def mean(self, trees: list[Tree], weights: list[np.float32] | None = None) -> Tree:
        result: Tree = {}
        by = np.float32(1) / reduce(np.add, weights) if weights else np.float32(1 / CLUSTERS)
        for k in trees[0]:
            sent = []
            for c, tree in enumerate(trees):
                x = tree[k].astype(np.float32) * (weights[c] if weights else np.float32(1)) + self.kept[c][k]
                sent.append(rounded(x, self.form))
                if self.feedback:
                    self.kept[c][k] = x - sent[-1]
            result[k] = np.asarray(reduce(np.add, sent) * by + np.float32(0))  # no negative zeros
        return result


def place(tree: Tree, **more: Any) -> dict[str, jax.Array]:
    return put(tree, {k: SPECS[k] for k in tree}, **more)


# --- scenarios: each may return what every cluster must have alike ---


def formats() -> Any:
    """Bit for bit what numpy computes, in every format, over some steps, with weights and without, and what is kept."""
    last = None
    for form, weighted, feedback in (
        ("bfloat16", False, True),
        ("float8_e4m3fn", True, True),
        ("int8", False, True),
        ("int8", True, False),
    ):
        weights = WEIGHTS[:CLUSTERS] if weighted else None
        link = hetccl.optax.synchronize(wire_dtype=form, error_feedback=feedback, name=f"weighted {weighted}")
        state, oracle = link.init(place(gradient(C))), Oracle(form, feedback)
        update = jax.jit(lambda g, s, link=link, w=weights and weights[C]: link.update(g, s, weight=w))
        for step in range(3):
            last, state = update(place(gradient(C, step)), state)
            expect(last, oracle.mean([gradient(c, step) for c in range(CLUSTERS)], weights))
        if feedback:
            expect(state.residual, oracle.kept[C])
        else:
            assert state == optax.EmptyState()
    return last


def errors_are_sent_later() -> None:
    """Without feedback small values in a row of large ones are never sent; with it their sum arrives."""
    tree = {"row": np.full(SHAPES["row"], 1e-3, np.float32)}
    tree["row"][..., 0] = 1
    for feedback, wanted in ((True, 1), (False, 0)):
        link = hetccl.optax.synchronize(wire_dtype="int8", error_feedback=feedback, name="later")
        state, total, update = link.init(place(tree)), np.zeros(SHAPES["row"], np.float32), jax.jit(link.update)
        for _ in range(40):
            mean, state = update(place(tree), state)
            total += np.asarray(mean["row"].addressable_data(0))
        np.testing.assert_allclose(total[..., 1:], wanted * 40e-3, atol=wanted / 64)


def narrow_leaves() -> None:
    """Gradients of narrow floats keep their dtypes; what is kept is float32."""
    link = hetccl.optax.synchronize(wire_dtype=jnp.int8)
    mine = place(gradient(C, dtype=jnp.bfloat16))
    mean, state = jax.jit(link.update)(mine, link.init(mine))
    oracle = Oracle("int8")
    want = oracle.mean([gradient(c) for c in range(CLUSTERS)])
    expect(mean, {k: v.astype(jnp.bfloat16) for k, v in want.items()})
    expect(state.residual, oracle.kept[C])


def not_finite() -> None:
    """What is not finite stays so, in all clusters; what is kept stays finite, and the next step is well."""
    for form in FORMATS:
        link = hetccl.optax.synchronize(wire_dtype=form, name="bad")
        update = jax.jit(link.update)
        for bad in (np.nan, -np.inf):
            oracle = Oracle(form)
            first = [{"row": gradient(c)["row"]} for c in range(CLUSTERS)]
            mean, state = update(place(first[C]), link.init(place(first[C])))
            expect(mean, oracle.mean(first))
            kept = oracle.kept[C]["row"].copy()
            mine = {"row": gradient(C, 1)["row"]}
            if C == CLUSTERS - 1:
                mine["row"][1, 1, 3] = bad
            mean, state = update(place(mine), state)
            got = np.asarray(mean["row"].addressable_data(0))
            wrong = ~np.isfinite(got)
            assert wrong[1, 1, 3] and wrong.sum() == (1 if form == "bfloat16" else 70), (form, bad, wrong.sum())
            residual = np.asarray(state.residual["row"].addressable_data(0))
            assert np.isfinite(residual).all()
            if C == CLUSTERS - 1:
                assert (residual == kept)[1, 1, 3]
            mean, _ = update(place(first[C]), state)
            assert np.isfinite(np.asarray(mean["row"].addressable_data(0))).all()


def absent() -> None:
    """A cluster of weight 0 counts for nothing, whatever its values are, and keeps what it has not sent."""
    link = hetccl.optax.synchronize(wire_dtype="int8")
    update = jax.jit(lambda g, s, w: link.update(g, s, weight=w))
    trees = [{"b": gradient(c)["b"]} for c in range(CLUSTERS)]
    _, state = update(place(trees[C]), link.init(place(trees[C])), 1.0)
    kept = jax.tree.map(lambda x: np.asarray(x), state.residual)
    mine = trees[C] if C == 0 else {"b": np.full(SHAPES["b"], np.nan, np.float32)}
    mean, after = update(place(mine), state, float(C == 0))
    assert np.isfinite(np.asarray(mean["b"])).all()
    if C:
        expect(after.residual, kept)
    nothing, _ = update(place(trees[C]), after, 0.0)
    assert np.isnan(np.asarray(nothing["b"])).all()


def chain() -> Any:
    """First in a chain: clipping and the optimizer see the gradient of all clusters; the weight comes with the update."""
    trees = [gradient(c) for c in range(CLUSTERS)]
    rest = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    params, everyone = place(gradient(9)), None
    for form, weight, want in (
        (None, None, jax.tree.map(lambda *x: reduce(np.add, x) * np.float32(1 / CLUSTERS), *trees)),
        ("int8", WEIGHTS, Oracle("int8").mean(trees, WEIGHTS[:CLUSTERS])),
    ):
        alone, _ = jax.jit(rest.update)(jax.tree.map(np.asarray, want), rest.init(gradient(9)))
        optimizer = optax.chain(hetccl.optax.synchronize(wire_dtype=form), rest)
        update = jax.jit(lambda g, s, p, w, o=optimizer: o.update(g, s, p, weight=w))
        everyone, _ = update(place(trees[C]), jax.jit(optimizer.init)(params), params, weight and weight[C])
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), everyone, alone)
    return None if N > 1 else if_compiled_alike(everyone)  # a cluster's own norm is summed in its own order


def explicit_axes() -> None:
    """Axes whose shardings are part of the types."""
    mesh = mesh_of(AxisType.Explicit)
    link = hetccl.optax.synchronize(wire_dtype="int8", name="explicit")
    mine = place(gradient(C), mesh=mesh)
    expect(jax.jit(link.update)(mine, link.init(mine))[0], Oracle("int8").mean([gradient(c) for c in range(CLUSTERS)]))


def sent_by(run: Callable[[], Any]) -> int:
    """Bytes that left this cluster."""
    world = hetccl.world()
    before = world.engine.stats()["bytes_sent"]
    jax.block_until_ready(run())
    mine = world.engine.stats()["bytes_sent"] - before
    said = world.control.meet("test bytes", mine, 30)
    return sum(n for m, n in said.items() if world.control.members[m].cluster == C)


def bytes_on_the_wire() -> None:
    """A byte or two for each element, one for each row, to each other cluster; sharded and replicated."""
    for how, spec in (("sharded", SPECS["w"]), ("replicated", P())):
        tree = put({"w": gradient(C)["w"]}, {"w": spec})
        for form, elements, rows in (("bfloat16", 2, 0), ("float8_e4m3fn", 1, 4), ("int8", 1, 4)):
            link = hetccl.optax.synchronize(wire_dtype=form, name=f"bytes {how}")
            update, state = jax.jit(link.update), link.init(tree)
            jax.block_until_ready(update(tree, state))
            found = sent_by(lambda update=update, state=state: update(tree, state))
            # [12, 24]: a row of 24 elements is shorter than a block, so the whole array is one; its exponent is a
            # single element, which goes to every rank.
            others = sum(DEVICES) - N
            wanted = (CLUSTERS - 1) * 12 * 24 * elements + (others if rows else 0)
            assert found == wanted, (how, form, found, wanted)


def refusals() -> None:
    """What has no meaning says so."""
    raises(hetccl.ConfigError, "bfloat16, float8_e4m3fn, int8", lambda: hetccl.optax.synchronize(wire_dtype="int4"))
    raises(hetccl.ConfigError, "every=0", lambda: hetccl.optax.diloco(optax.sgd(1.0), 0))
    raises(hetccl.ConfigError, "fragments=4", lambda: hetccl.optax.diloco(optax.sgd(1.0), 3, fragments=4))
    raises(hetccl.ConfigError, "mixing=1.5", lambda: hetccl.optax.diloco(optax.sgd(1.0), 3, mixing=1.5))
    link = hetccl.optax.synchronize(wire_dtype="int8")
    tree = place({"row": gradient(C)["row"]})
    state = link.init(tree)
    whole = {"row": tree["row"].astype(np.int32)}
    raises(hetccl.UnsupportedError, "['row'] is int32[3,2,70]", lambda: link.update(whole, state))
    raises(hetccl.UnsupportedError, "int32[3,2,70]", lambda: hetccl.optax.diloco(optax.sgd(1.0), 3).init(whole))
    of = jax.grad(lambda g: jnp.sum(link.update(g, state)[0]["row"]))
    raises(hetccl.UnsupportedError, "no useful derivative", lambda: of(tree))
    inside = jax.shard_map(lambda g: link.update(g, state)[0], mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)
    raises(hetccl.UnsupportedError, "inside a shard_map", lambda: jax.jit(inside)(tree))


def differing() -> None:
    """Other formats, or outer steps at other times, are errors of both before anything moves, and name both."""
    tree = {"a": np.ones((12,), np.float32)}
    forms = ("int8", None, "bfloat16", "float8_e4m3fn")
    for first, second in itertools.pairwise(forms):
        link = hetccl.optax.synchronize(wire_dtype=(first, second)[C], name=f"{first} {second}")
        both = [f"wire_dtype = {first} in 'left'", f"{second} in 'right'"]
        if C:
            both = [f"wire_dtype = {second} in 'right'", f"{first} in 'left'"]
        raises(hetccl.AgreementError, ", ".join(both), lambda link=link: jax.jit(link.update)(tree, link.init(tree)))
    outer = hetccl.optax.diloco(optax.sgd(1.0), every=2 + C)
    run = jax.jit(outer.apply_updates)
    raises(hetccl.AgreementError, "every=3", lambda: run(tree, tree, outer.init(tree)))
    hetccl.check()
    expect(jax.jit(hetccl.sync)(tree), tree)


# --- DiLoCo ---

RATE, MOMENTUM, EVERY = np.float32(0.7), np.float32(0.9), 4


def locally(cluster: int, step: int, params: Tree) -> Tree:
    """A cluster's own step: towards a target of its own. One product and one addition, so that all round alike."""
    rng = np.random.default_rng((cluster, step, 7))
    return {k: rng.standard_normal(v.shape).astype(jnp.bfloat16).astype(np.float32) for k, v in sorted(params.items())}


def nesterov(anchor: np.ndarray, mean: np.ndarray, trace: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """optax.sgd(RATE, MOMENTUM, nesterov=True), in double precision."""
    trace = mean + np.float64(MOMENTUM) * trace
    return anchor - np.float64(RATE) * (mean + np.float64(MOMENTUM) * trace), trace


def oracle(steps: int, overlap: bool, mixing: float, parts: list[list[str]], form: str | None = None) -> Any:
    """Streaming DiLoCo as its paper tells it, for all clusters, in numpy."""
    # What is rounded to a format must be the program's own bits, or another rounding follows.
    start = {k: v.astype(np.float32 if form else np.float64) for k, v in begin().items()}
    params = [dict(start) for _ in range(CLUSTERS)]
    anchor, trace = dict(start), {k: np.zeros_like(v) for k, v in start.items()}
    for step in range(1, steps + 1):
        before = [dict(p) for p in params]
        for c in range(CLUSTERS):
            for k, v in locally(c, step, params[c]).items():
                params[c][k] = params[c][k] + v
        for n, part in enumerate(parts):
            if (step - n * EVERY // len(parts)) % EVERY == 0:
                for k in part:
                    source = before if overlap else params
                    deltas = [anchor[k] - source[c][k] for c in range(CLUSTERS)]
                    if form:
                        deltas = [rounded(d, form).astype(np.float64) for d in deltas]
                    anchor[k], trace[k] = nesterov(anchor[k], sum(deltas) / CLUSTERS, trace[k])
                    for c in range(CLUSTERS):
                        share = mixing if overlap else 0
                        params[c][k] = share * params[c][k] + (1 - share) * anchor[k]
    return params, anchor


def begin() -> Tree:
    return {k: np.asarray(np.random.default_rng(3).standard_normal(SHAPES[k]) * 4, np.float32) for k in ("w", "b", "s")}


def train(outer: Any, steps: int, static: bool = False) -> tuple[Any, Any]:
    """Trains; the host says when outer steps are, or the program finds out."""
    params = place(begin())
    state = outer.init(params)
    apply = jax.jit(outer.apply_updates, donate_argnums=(0, 2), static_argnums=3)
    for step in range(1, steps + 1):
        due = outer.due(step - 1) if static else None
        params, state = jax.block_until_ready(apply(params, place(locally(C, step, begin())), state, due))
    return params, state


def if_compiled_alike(tree: Any) -> Any:
    """What an optimizer made, to be compared between clusters by its bits. LLVM without optimisation makes one instruction
    of a product and a sum, or two, as it happens to translate a program; compilers of two platforms round differently."""
    unoptimised = "optimization_level=0" in os.environ.get("XLA_FLAGS", "")
    return None if unoptimised or len({c.platform for c in hetccl.world().clusters}) > 1 else tree


def close(got: Any, want: Any) -> None:
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            x.addressable_data(0), y[x.addressable_shards[0].index], rtol=1e-5, atol=1e-5
        ),
        got,
        want,
    )


def diloco() -> Any:
    """What the papers say, with fragments and without, overlapped and not; the anchors have the same bits everywhere."""
    sgd = optax.sgd(float(RATE), float(MOMENTUM), nesterov=True)
    alike = []
    for overlap, mixing, fragments, static in ((False, 0.0, 1, True), (True, 0.5, 2, False)):
        outer = hetccl.optax.diloco(sgd, EVERY, overlap=overlap, mixing=mixing, fragments=fragments, name="d")
        params, state = train(outer, 2 * EVERY, static)
        parts = [["b", "s", "w"]] if fragments == 1 else [["b", "s"], ["w"]]
        wanted, anchor = oracle(2 * EVERY, overlap, mixing, parts)
        close(params, wanted[C])
        close(state.anchor, anchor)
        alike.append((state.anchor, state.outer))
        if not (overlap and mixing) and fragments == 1:  # that step ended with an outer step of everything
            if jax.process_count() == 1:
                expect(params, jax.tree.map(np.asarray, state.anchor))
            alike.append(params)
    return if_compiled_alike(alike)


def diloco_narrow() -> Any:
    """Pseudo-gradients in a narrow format; what is lost is kept."""
    sgd = optax.sgd(float(RATE), float(MOMENTUM), nesterov=True)
    for feedback in (True, False):
        outer = hetccl.optax.diloco(sgd, EVERY, wire_dtype="int8", error_feedback=feedback, name=f"n{feedback}")
        params, state = train(outer, EVERY)
        wanted, _ = oracle(EVERY, False, 0, [["b", "s", "w"]], "int8")
        close(params, wanted[C])
        assert (state.residual is not None) == feedback
    return if_compiled_alike((params, state.anchor, state.outer))


def lost_is_sent_later() -> Any:
    """What the first outer step lost in rounding goes out with the second, here by itself."""
    outer = hetccl.optax.diloco(optax.sgd(1.0), EVERY, wire_dtype="int8", name="lost")
    params, state = train(outer, EVERY)
    moved = []
    for c in range(CLUSTERS):
        ended = begin()
        for step in range(1, EVERY + 1):
            ended = {k: v + locally(c, step, ended)[k] for k, v in ended.items()}
        moved.append({k: v - ended[k] for k, v in begin().items()})
    lost = [{k: v - rounded(v, "int8") for k, v in tree.items()} for tree in moved]
    close(state.residual, lost[C])
    want = begin()
    for trees in (moved, lost):
        means = {k: sum(rounded(tree[k], "int8") for tree in trees) / CLUSTERS for k in want}
        assert all(np.abs(x).max() > 1e-3 for x in means.values()), "otherwise nothing is seen"
        want = {k: v - means[k] for k, v in want.items()}
    apply = jax.jit(outer.apply_updates, donate_argnums=(0, 2))
    for _ in range(EVERY):  # nothing moves
        params, state = apply(params, place({k: np.zeros_like(v) for k, v in want.items()}), state)
    close(state.anchor, want)
    return if_compiled_alike(state.anchor)


def averaging() -> Any:
    """An outer step after every local step that takes the mean itself is plain averaging."""
    params, _ = train(hetccl.optax.diloco(optax.sgd(1.0), 1, name="a"), 3)
    want = {k: v.astype(np.float64) for k, v in begin().items()}
    for step in range(1, 4):
        moves = [locally(c, step, begin()) for c in range(CLUSTERS)]
        want = {k: v + sum(m[k].astype(np.float64) for m in moves) / CLUSTERS for k, v in want.items()}
    close(params, want)
    return if_compiled_alike(params)


def fewer_bytes() -> None:
    """The parameters cross once in so many steps, a fragment at a time, and nothing in the other steps."""
    size, others = 4 * (12 * 24 + 30), sum(DEVICES) - N
    sizes = {k: 4 * v.size for k, v in begin().items()}
    way = 1.0 if CLUSTERS == 2 else 2 * (CLUSTERS - 1) / CLUSTERS
    single = 4 * others if CLUSTERS == 2 else None  # the scalar goes to every rank, or is owned
    outer = hetccl.optax.diloco(optax.sgd(1.0), 3, fragments=2, name="bytes")
    params = place(begin())
    state = outer.init(params)
    apply = jax.jit(outer.apply_updates)
    found = []
    for _ in range(6):

        def run() -> Any:
            nonlocal params, state
            params, state = apply(params, params, state)
            return params

        found.append(sent_by(run))
    if CLUSTERS == 2:
        later, first = sizes["w"], sizes["b"] + single
        assert found == [later, 0, first, later, 0, first], (found, later, first)
    else:
        assert min(found[0], found[2]) > 0
        assert found[:3] == found[3:] and found[1] == 0 and sum(found[:3]) <= way * (size + 4) * 1.1, found


if __name__ == "__main__":
    sync_worker.main(globals())
