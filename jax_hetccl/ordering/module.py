"""The ordering pass over a lowered program (StableHLO).

:func:`finish` walks a module once. In every block it replaces the exchange markers by buckets of
``hetccl_exchange_start`` and ``hetccl_exchange_done`` in the order of :mod:`jax_hetccl.ordering.schedule`, threads one
token (the *chain*) through all of them and through every call, loop, branch and manual computation on the way, and
ends each outermost manual computation with a check that raises a failed exchange's error on all devices alike.

The chain is what fixes the order: XLA may reorder, merge, drop or hoist anything that is only side-effecting, and
different compilers do it differently; a data dependence they all keep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jax_hetccl import _compat, exchange, island
from jax_hetccl import plan as plans
from jax_hetccl._compat import hlo, ir, sdy
from jax_hetccl._errors import UnsupportedError
from jax_hetccl._world import World
from jax_hetccl.ordering import overlap, rewrite
from jax_hetccl.ordering.schedule import Done, Item, Kind, Run, Start, schedule

# Operands in flight: each started exchange holds receive buffers too. Beyond this everything started is finished first.
INFLIGHT_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Program:
    """What the pass made of a module: its exchanges in order, with the nesting, and the id the clusters compare; the
    program ids of its streams."""

    id: int
    lines: tuple[str, ...]
    streams: frozenset[int] = frozenset()


def finish(world: World, registry: exchange.Registry, module: ir.Module) -> Program | None:
    """Orders the exchanges of a module in place.

    Args:
      world: gives the limits for buckets; its engine learns the plans.
      registry: what the markers stand for.
      module: as JAX lowered it.

    Returns:
      The program's exchanges, or None if it has none (then the module is untouched).

    Raises:
      UnsupportedError: an exchange stands in a region that the pass does not know.
    """
    walk = _Pass(world, registry, module)
    if not walk.has_exchange(walk.functions["main"]):
        walk.remove_markers()
        return None
    with module.context, ir.Location.unknown(module.context):
        program = walk.run()
        walk.remove_markers()
        if not module.operation.verify():
            raise RuntimeError("the ordering pass produced an invalid module")
    return program


class _Pass:
    """One walk over a module. ``chain`` is always the latest value of the token."""

    def __init__(self, world: World, registry: exchange.Registry, module: ir.Module):
        self.world, self.registry, self.module = world, registry, module
        self.functions = {
            ir.StringAttr(f.operation.attributes["sym_name"]).value: f.operation
            for f in module.body.operations
            if f.operation.name == "func.func"
        }
        self.partitions = ir.IntegerAttr(module.operation.attributes["mhlo.num_partitions"]).value
        self.lines: list[str] = []
        self.syncs: list[int] = []
        self.streams: set[int] = set()
        self._has: dict[str, bool] = {}  # functions with exchanges
        self._threaded: dict[str, list[str]] = {}  # functions done, and their part of ``lines``
        self._emitted: list[ir.Operation] = []  # starts and dones, whose attributes name the program
        self._count = 0

    def run(self) -> Program:
        block = self.functions["main"].regions[0].blocks[0]
        with ir.InsertionPoint.at_block_begin(block):
            chain = _compat.constant(np.zeros((exchange.CHAIN_WORDS,), np.uint32))
        chain = self.block(block, chain, checked=False)
        if self.partitions == 1:
            self.check(block, chain)
        program = exchange.fingerprint(tuple(self.lines))
        for index, op in self._numbered():
            rewrite.add_attributes(op, program=exchange.i64(program), index=exchange.i64(index))
        if self.syncs:
            rewrite.note_syncs(self.module, self.syncs)
        return Program(program, tuple(self.lines), frozenset(self.streams))

    # --- what is where ---

    def has_exchange(self, op: ir.Operation) -> bool:
        """Whether an exchange runs when the operation does."""
        if op.name == "stablehlo.custom_call":
            return rewrite.target(op) in (exchange.MARKER, _compat.CHAIN_BEGIN, _compat.CHAIN_END)
        for name in rewrite.callees(op):
            if name not in self._has:
                self._has[name] = False
                self._has[name] = name in self.functions and self.has_exchange(self.functions[name])
            if self._has[name]:
                return True
        return any(self.has_exchange(o) for o in rewrite.inner(op))

    def item(self, op: ir.Operation, emitted: bool, producers: dict[ir.Value, int]) -> Item:
        """The operation as the scheduler sees it. What a decomposition emitted is light: it differs between clusters
        (one of one device needs no local collectives), and the order must not."""
        needs = frozenset(producers[v] for v in rewrite.used(op) if v in producers)
        if op.name == "stablehlo.custom_call" and rewrite.target(op) == exchange.MARKER:
            spec = self.registry[rewrite.plan_id(op)]
            return Item(Kind.EXCHANGE, needs, spec.payload, spec.group, spec.stream is not None)
        if self.has_exchange(op):
            return Item(Kind.REGION, needs)
        return Item(Kind.LIGHT if emitted else Kind.PLAIN, needs)

    @property
    def launched(self) -> bool:
        """Whether the order of launches is fixed when the program is compiled, as on a GPU; a CPU runs what is ready."""
        return self.world.clusters[self.world.cluster].platform != "cpu"

    # --- blocks ---

    def block(self, block: ir.Block, chain: ir.Value, *, checked: bool) -> ir.Value:
        """Orders a block and everything in it; ``checked`` says that a surrounding region has the check."""
        # The chain's own beginning stays where it is: a receive that needs nothing comes before all else.
        *ops, end = (o.operation for o in block.operations if chain not in list(o.operation.results))
        for segment in rewrite.segments(ops, self.has_exchange):
            chain = self.segment(segment, end, chain, checked)
        return chain

    def segment(
        self, pairs: Sequence[tuple[ir.Operation, bool]], end: ir.Operation, chain: ir.Value, checked: bool
    ) -> ir.Value:
        ops = [op for op, _ in pairs]
        producers = {v: i for i, op in enumerate(ops) for v in exchange.values(op)}
        items = [self.item(op, emitted, producers) for op, emitted in pairs]
        # The place of each exchange in program order is part of what both sides compare.
        places = {i: n for n, i in enumerate(i for i, it in enumerate(items) if _is_counted(it))}
        bucket_bytes = int(self.world.config.bucket_mb * (1 << 20))
        steps = schedule(items, bucket_bytes=bucket_bytes, inflight_bytes=INFLIGHT_BYTES)
        heavy = [i for i, op in enumerate(ops) if self.launched and rewrite.is_heavy(op, self.functions)]
        ties = overlap.ties(items, steps, heavy)
        ran: list[ir.Operation] = []
        started: dict[tuple[int, ...], _Bucket] = {}
        for step in steps:
            match step:
                case Run(i):
                    if i in ties.behind_start:
                        chain = rewrite.tied_behind(ops[i], chain, end)
                    ops[i].move_before(end)
                    ran.append(ops[i])
                    if items[i].kind is Kind.REGION:
                        chain = self.region(ops[i], chain, checked)
                case Start(bucket):
                    ran = ran if started else []  # of this round only
                    with ir.InsertionPoint(end):
                        at = [places.get(i, -1) for i in bucket]
                        chain, started[bucket] = self.start([ops[i] for i in bucket], at, chain)
                case Done(bucket):
                    for i in ties.before_done.get(bucket, ()):
                        chain = rewrite.tied_before(ops[i], chain, end, ran)
                    with ir.InsertionPoint(end):
                        chain = self.done([ops[i] for i in bucket], started.pop(bucket), chain)
        return chain

    def start(
        self, markers: Sequence[ir.Operation], places: Sequence[int], chain: ir.Value
    ) -> tuple[ir.Value, _Bucket]:
        spec = exchange.bucket([self.registry[rewrite.plan_id(m)] for m in markers], places)
        teach(self.world, spec)
        if spec.program is not None:
            self.streams.add(spec.program)
            self.world.engine.set_program(spec.program, f"stream {spec.stream}")
        if spec.stream is None:  # the other clusters' programs need not have the streams of this one
            self.lines.append(f"{spec.wire_id:016x}")
        sends = [v for m in markers for v in m.operands]
        types = [v.type for m in markers for v in list(m.results)[: len(m.results) - len(m.operands)]]
        # A sent value that no compiler can compute again stands for itself; the others pass through the start. Nothing
        # is computed from what a stream sends, and to pass it through would copy it where it is used elsewhere.
        kept = [i for i, v in enumerate(sends) if spec.stream is None and not rewrite.is_settled(v)]
        where = ir.Location.name(spec.text, childLoc=markers[0].location)  # the name that profiles show
        with where:
            if self.launched:
                sends = [v if i in kept else rewrite.apart(v) for i, v in enumerate(sends)]
            started = exchange.emit_start(spec, chain, sends, kept, types)
        self.emitted(spec, started.op)
        return started.chain, _Bucket(spec, started, where)

    def done(self, markers: Sequence[ir.Operation], bucket: _Bucket, chain: ir.Value) -> ir.Value:
        with bucket.where:
            op, chain, buffers = exchange.emit_done(bucket.spec, chain, bucket.started)
            if self.launched:
                buffers = [rewrite.apart(v) for v in buffers]
        self.emitted(bucket.spec, op)
        received, sent = iter(buffers), iter(bucket.started.sends)
        for marker in markers:
            new = [next(received) for _ in range(len(marker.results) - len(marker.operands))]
            new += [next(sent) for _ in marker.operands]
            for old, value in zip(marker.results, new, strict=True):
                old.replace_all_uses_with(value)
            marker.erase()
        return chain

    def emitted(self, spec: exchange.Exchange, op: ir.Operation) -> None:
        """Takes note of a start or done; those of streams get their program at once."""
        if spec.program is None:
            self._emitted.append(op)
        else:
            rewrite.add_attributes(op, program=exchange.i64(spec.program), index=exchange.i64(0))

    # --- regions ---

    def region(self, op: ir.Operation, chain: ir.Value, checked: bool) -> ir.Value:
        """Threads the chain through an operation with exchanges inside; returns the chain behind it."""
        match op.name:
            case "func.call":
                return self.call(op, chain, checked)
            case "stablehlo.while":
                return self.loop(op, chain, checked)
            case "stablehlo.case" | "stablehlo.if":
                return self.branch(op, chain, checked)
            case "sdy.manual_computation":
                return self.manual(op, chain, checked)
            case "stablehlo.custom_call" if rewrite.target(op) == _compat.CHAIN_BEGIN:
                op.result.replace_all_uses_with(chain)
                op.erase()
                return chain
            case "stablehlo.custom_call" if rewrite.target(op) == _compat.CHAIN_END:
                return self.own_exchanges(op)
        inner = next((t for t in rewrite.texts(op, self.registry)), "sync")
        raise UnsupportedError(
            f"{inner}: a collective over a spanning axis stands inside a {op.name} operation, through which exchanges "
            "cannot be ordered. Move the collective out of it; jit, scan, while_loop, cond, remat and shard_map are fine."
        )

    def call(self, op: ir.Operation, chain: ir.Value, checked: bool) -> ir.Value:
        (name,) = rewrite.callees(op)
        if name in self._threaded:
            self.lines.extend(self._threaded[name])
        else:
            before = len(self.lines)
            rewrite.extend_signature(self.functions[name])
            block = self.functions[name].regions[0].blocks[0]
            inner = block.add_argument(exchange.chain_type(), op.location)
            rewrite.extend_end(block, self.block(block, inner, checked=checked))
            self._threaded[name] = self.lines[before:]
        return rewrite.rebuilt(op, [*op.operands, chain]).results[-1]

    def loop(self, op: ir.Operation, chain: ir.Value, checked: bool) -> ir.Value:
        op = rewrite.rebuilt(op, [*op.operands, chain])
        predicate, body = (r.blocks[0] for r in op.regions)
        self.lines.append("loop(")
        in_predicate = predicate.add_argument(exchange.chain_type(), op.location)
        has_predicate = any(self.has_exchange(o.operation) for o in predicate.operations)
        self.block(predicate, in_predicate, checked=checked)
        self.lines.append(",")
        in_body = body.add_argument(exchange.chain_type(), op.location)
        end = self.block(body, in_body, checked=checked)
        # The predicate's chain cannot leave it. Outside of regions a program of several devices has regions and syncs
        # there, which end with a check of their own.
        has_predicate = has_predicate and (checked or self.partitions == 1)
        if has_predicate and end == in_body:
            # A chain that no trip changes would be the one in front of the loop to a compiler: nothing behind the loop
            # waited for the predicate's exchanges.
            with ir.InsertionPoint(list(body.operations)[-1]):
                end = exchange.emit_status(in_body)
        rewrite.extend_end(body, end)
        self.lines.append(")")
        chain = op.results[-1]
        if has_predicate:
            with rewrite.behind(op):
                chain = exchange.emit_status(chain)
        return chain

    def branch(self, op: ir.Operation, chain: ir.Value, checked: bool) -> ir.Value:
        op = rewrite.rebuilt(op, list(op.operands))
        self.lines.append("branch(")
        for region in op.regions:
            rewrite.extend_end(region.blocks[0], self.block(region.blocks[0], chain, checked=checked))
            self.lines.append("|")
        self.lines.append(")")
        return op.results[-1]

    def manual(self, op: ir.Operation, chain: ir.Value, checked: bool) -> ir.Value:
        shardings = {k: rewrite.replicated_too(op.attributes[k]) for k in ("in_shardings", "out_shardings")}
        op = rewrite.rebuilt(op, [*op.operands, chain], attributes=shardings)
        block = op.regions[0].blocks[0]
        inner = block.add_argument(exchange.chain_type(), op.location)
        full = rewrite.is_full(op, self.module)
        inner = self.block(block, inner, checked=True)  # the outermost region has it, at its end or behind it
        if full and not checked:
            self.check(block, inner)
        rewrite.extend_end(block, inner)
        chain = op.results[-1]
        return chain if full or checked else self.check_alone(op, chain)

    def own_exchanges(self, op: ir.Operation) -> ir.Value:
        """The end of a piece of program that has its exchanges already; returns the chain behind it."""
        self.syncs.append(rewrite.plan_id(op))
        self.lines.append(f"{self.syncs[-1]:016x}")
        chain, *through = op.operands
        owner = chain.owner.operation if isinstance(chain.owner, ir.OpView) else chain.owner
        if isinstance(owner, ir.Operation) and rewrite.target(owner) == _compat.PARTITIONED:
            owner.attributes["has_side_effect"] = ir.BoolAttr.get(True)  # exchanges inside: neither dropped nor doubled
        for old, value in zip(exchange.values(op), through, strict=True):
            old.replace_all_uses_with(value)
        op.erase()
        return chain

    # --- checks ---

    def check(self, block: ir.Block, chain: ir.Value) -> None:
        """Ends a block with the check; what the block computed passes through it, so that nothing behind it runs (a
        local collective, say) on one device while another one has stopped."""
        end = list(block.operations)[-1].operation
        own = {v for o in block.operations for v in o.operation.results}
        values = list(dict.fromkeys(v for v in end.operands if v in own and v != chain))
        with ir.InsertionPoint(end):
            checked = dict(zip(values, exchange.emit_check(self.agreed_flag(chain), values), strict=True))
        for i, value in enumerate(list(end.operands)):
            if value in checked:
                end.operands[i] = checked[value]

    def check_alone(self, op: ir.Operation, chain: ir.Value) -> ir.Value:
        """The check behind a partly manual region, in a manual computation of its own."""
        sharding = sdy.TensorShardingPerValueAttr(op.attributes["out_shardings"]).shardings[-1]
        per_value = sdy.TensorShardingPerValueAttr.get([sharding])
        axes = sdy.ManualAxesAttr.get([ir.StringAttr.get(a) for a in rewrite.mesh_axes(op, self.module)])
        with rewrite.behind(op):
            region = sdy.ManualComputationOp([exchange.chain_type()], [chain], per_value, per_value, axes)
        block = ir.Block.create_at_start(region.body, [exchange.chain_type()])
        with ir.InsertionPoint(block):
            exchange.emit_check(self.agreed_flag(block.arguments[0]), [])
            sdy.return_([block.arguments[0]])
        return region.operation.results[0]

    def agreed_flag(self, chain: ir.Value) -> ir.Value:
        """Whether an exchange failed on any device of the cluster: all of them must stop, or none."""
        last = exchange.CHAIN_WORDS - 1
        flag = hlo.slice(chain, [last], [last + 1], [1])
        if self.partitions == 1:
            return flag
        everyone: Any = np.arange(self.partitions, dtype=np.int64).reshape(1, -1)
        groups = ir.DenseElementsAttr.get(everyone)
        handle = hlo.ChannelHandle.get(_compat.COLLECTIVE_CHANNEL, _compat.DEVICE_TO_DEVICE)
        op = hlo.AllReduceOp([flag.type], [flag], groups, channel_handle=handle, use_global_device_ids=True)
        scalar = ir.RankedTensorType.get([], ir.RankedTensorType(flag.type).element_type)
        reducer = op.regions[0].blocks.append(scalar, scalar)
        with ir.InsertionPoint(reducer):
            hlo.return_([hlo.maximum(*reducer.arguments)])
        return op.results[0]

    # --- the end ---

    def _numbered(self) -> list[tuple[int, ir.Operation]]:
        """Starts and dones with the position of their exchange in the program."""
        numbers: dict[ir.Value, int] = {}
        result = []
        for op in self._emitted:
            ticket = op.results[1] if rewrite.target(op) == exchange.START else op.operands[1]
            result.append((numbers.setdefault(ticket, len(numbers)), op))
        return result

    def remove_markers(self) -> None:
        """Removes the region markers that a shard_map without a region left."""

        def visit(op: ir.Operation) -> None:
            for inner in list(rewrite.inner(op)):
                if inner.name == "stablehlo.custom_call" and rewrite.target(inner) in _compat.MARKERS:
                    inner.erase()
                elif len(inner.regions):
                    visit(inner)

        visit(self.module.operation)


def _is_counted(item: Item) -> bool:
    return item.kind is Kind.EXCHANGE and not item.stream


@dataclasses.dataclass(frozen=True)
class _Bucket:
    spec: exchange.Exchange
    started: exchange.Started
    where: ir.Location


class Teachable(Protocol):
    """What the engine learns of an exchange; see ``exchange.Exchange``."""

    @property
    def id(self) -> int: ...
    @property
    def wire_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def plan(self) -> plans.Plan: ...


def teach(world: World, spec: Teachable) -> None:
    """Tells the engine an exchange's plan for each device of this process, and opens the channels it sends on."""
    mine = {world.rank_of_device(d): d for d in jax.local_devices()}
    world.ensure_channels((rank, r.peer) for rank, part in spec.plan.items() if rank in mine for r in part.sends)
    for rank, part in spec.plan.items():
        if rank in mine:
            sends = [dataclasses.astuple(r) for r in part.sends]
            recvs = [dataclasses.astuple(r) for r in part.recvs]
            world.engine.add_plan(spec.id, spec.text, spec.wire_id, island.ordinal(mine[rank]), sends, recvs)
