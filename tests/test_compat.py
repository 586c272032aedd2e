"""Every private JAX name that _compat/ uses, checked on its own: a JAX that moves one fails here, by name."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler, core, dispatch, effects
from jax._src import mesh as mesh_lib
from jax._src import shard_map as shard_map_lib
from jax._src.interpreters import ad, batching, mlir, pxla
from jax._src.lax import parallel
from jax._src.lax.control_flow import loops

from jax_hetccl import _compat
from jax_hetccl._compat import compiling, loading
from jax_hetccl._compat.collectives import DECOMPOSED
from jax_hetccl._compat.communication import CommunicationEffect

_NOT_IN_ALL = {"unreduced_pmax_p", "unreduced_pmin_p"}  # not in jax 0.10
_KNOWN = [name for name in DECOMPOSED if name not in _NOT_IN_ALL or hasattr(parallel, name)]


def test_tested_versions():
    assert (0, 10) <= jax.__version_info__[:2] <= (0, 12), "extend the range only after running all tests"


@pytest.mark.parametrize(
    ("owner", "name", "arguments"),
    [
        (shard_map_lib, "_extend_axis_env", ["mesh", "newly_manual_axes"]),
        (core, "extend_axis_env_nd", None),
        (mlir, "lower_fun", ["fun", "multiple_results"]),
        (mlir, "register_lowering", ["prim", "rule", "platform", "inline", "cacheable"]),
        (mlir, "custom_call", None),
        (mlir, "aval_to_ir_type", None),
        (mlir, "lower_jaxpr_to_module", None),
        (mlir, "ir_attribute", None),
        (mesh_lib, "use_abstract_mesh", None),
        (dispatch, "apply_primitive", ["prim"]),
        (batching, "moveaxis", None),
        (loops, "_scan_known_hoisting", ["jaxpr_known", "known_consts"]),
        (core, "typeof", None),
        (ad, "p2tz", None),
        (ad, "is_undefined_primal", None),
        (
            compiler,
            "backend_compile_and_load",
            ["backend", "module", "executable_devices", "options", "host_callbacks"],
        ),
        (
            compiler,
            "compile_or_get_cached",
            ["backend", "computation", "devices", "compile_options", "host_callbacks", "executable_devices"],
        ),
        (core.Primitive, "def_effectful_abstract_eval", None),
    ],
)
def test_function_is_where_it_was(owner, name, arguments):
    found = getattr(owner, name, None)
    assert callable(found), f"JAX moved {owner.__name__}.{name}, which _compat/ needs"
    if arguments:
        assert list(inspect.signature(found).parameters)[: len(arguments)] == arguments


def test_lowering_rules_are_kept_in_tables():
    for name in (*_KNOWN, "axis_index_p", "reduce_scatter_p", "all_gather_p"):
        primitive = getattr(parallel, name)
        # pbroadcast has rules for some platforms only.
        tables = (mlir._lowerings, *mlir._platform_specific_lowerings.values())
        entry = next(table[primitive] for table in tables if primitive in table)
        assert callable(entry.rule) and isinstance(entry.inline, bool), name
    assert isinstance(mlir._uncacheable_primitives, set)
    rule = mlir._lowerings[parallel.reduce_scatter_p].rule
    assert rule.args and rule.args[0] is jax.lax.add_p, "reduce_scatter's rule is no partial over the reducer any more"


def test_our_effect_is_known_everywhere():
    kinds = ("lowerable", "control_flow_allowed", "remat_allowed", "custom_derivatives_allowed")
    for kind in (*kinds, "partial_eval_kept"):
        assert getattr(effects, f"{kind}_effects").contains(CommunicationEffect()), kind
    assert isinstance(dispatch.prim_requires_devices_during_lowering, set)
    assert hasattr(batching.primitive_batchers, "__setitem__")


def test_types_say_along_which_axes_values_vary():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def f(x):
        seen.append(
            (_compat.checks_vma(), _compat.varying_axes(x), _compat.varying_axes(x * 0 + jax.lax.axis_index("a")))
        )
        return x

    for check in (True, False):
        spec = jax.sharding.PartitionSpec()
        jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check))(jnp.float32(1))
    assert seen == [(True, frozenset(), frozenset({"a"})), (False, frozenset(), frozenset())]


def test_shard_map_has_one_transpose_rule():
    tables = [
        t for t in (getattr(ad, "fancy_transposes", {}), ad.primitive_transposes) if shard_map_lib.shard_map_p in t
    ]
    assert len(tables) == 1


def test_a_single_operand_travels_through_each_reduction():
    for name in _KNOWN:
        assert not getattr(parallel, name).multiple_results, (
            f"{name} became variadic; _compat/collectives.py expects one operand"
        )


def test_lower_jaxpr_to_module_is_looked_up_in_its_module(monkeypatch):
    """The ordering pass hangs on that: pxla must call mlir.lower_jaxpr_to_module by attribute."""
    calls = []
    stock = mlir.lower_jaxpr_to_module
    monkeypatch.setattr(mlir, "lower_jaxpr_to_module", lambda *a, **k: calls.append(1) or stock(*a, **k))
    jax.jit(lambda x: x * 41 + 1).lower(jnp.float32(1))
    assert calls


class _Loads:
    """Hooks that see loads: what is under way, and what was."""

    def __init__(self, wanted=True):
        self.wanted, self.open, self.seen = wanted, 0, []
        self.at_end = lambda: None

    @contextlib.contextmanager
    def _section(self, devices):
        self.open += 1
        try:
            yield
        finally:
            self.at_end()
            self.open -= 1
            self.seen.append(devices)

    def loading(self, devices):
        return self._section(list(devices)) if self.wanted else None


def _long(x):
    """A program that still runs when its launch has returned; a small one the CPU's client runs before."""
    return jax.lax.fori_loop(0, 1000, lambda _, y: y @ y / 256, x) + 1


_ONES = np.ones((256, 256), np.float32)


_MOVED = (
    "JAX does not run the first call of every program through pxla.ExecuteReplicated.__call__ any more: find what does, "
    "and hook _compat/loading.py there, or a GPU that loads a program behind an exchange deadlocks until HETCCL_TIMEOUT"
)


def test_the_first_run_of_every_program_is_apart(monkeypatch):
    hooks, runs, stock = _Loads(), [], pxla.ExecuteReplicated.__call__

    def run(self, *args):
        runs.append(hooks.open)
        return stock(self, *args)

    monkeypatch.setattr(pxla.ExecuteReplicated, "__call__", loading.first_runs_apart(hooks, run))  # type: ignore[arg-type]
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    x = jnp.arange(3.0)
    mapped = jax.pmap(lambda x: x * 11 + 41)
    programs = {
        "jit": jax.jit(lambda x: x * 3 + 41),
        "ahead of time": jax.jit(lambda x: x * 5 + 41).lower(x).compile(),
        "shard_map": jax.jit(jax.shard_map(lambda x: x * 7 + 41, mesh=mesh, in_specs=spec, out_specs=spec)),
        "eager": jax.lax.bessel_i1e,
        "for its effects": jax.jit(lambda x: jax.debug.callback(lambda _: None, x)),
        "pmap": lambda x: mapped(x[None]),
    }
    for name, program in programs.items():
        for first in (True, False, False):
            runs.clear(), hooks.seen.clear()
            program(x)
            if first:
                assert runs == [1] * len(runs) and runs, f"{name}: {_MOVED}"
                assert len(hooks.seen) == len(runs) and hooks.seen[0] == jax.local_devices()[:1], name
            else:
                assert not hooks.seen and 1 not in runs, f"{name}: a program that has run is apart again"


def test_a_section_ends_behind_the_first_run_also_if_it_fails():
    hooks = _Loads()

    class Program:
        _local_devices = ("a device",)
        mut = None
        error: Exception | None = None

    results, ready = [], []

    def run(program):
        if program.error:
            raise program.error
        results[:] = [jax.jit(_long)(_ONES)]
        ready.append(results[0].is_ready())
        return results

    call = loading.first_runs_apart(hooks, run)  # type: ignore[arg-type]
    program = Program()
    program.error = ValueError("no memory")
    with pytest.raises(ValueError, match="no memory"):
        call(program)
    assert hooks.open == 0 and len(hooks.seen) == 1
    program.error = None
    hooks.at_end = lambda: ready.append(results[0].is_ready())
    call(program)
    assert ready == [False, True], "at the return of the launch, and at the section's end"
    assert hooks.open == 0 and hooks.seen == [["a device"]] * 2, "it has not run before"
    hooks.wanted = False
    other = Program()
    call(other)
    assert len(hooks.seen) == 2, "nothing has to be apart on a CPU"


@pytest.mark.parametrize("closed_over", [False, True])
def test_a_first_run_that_only_updates_refs_is_waited_for(monkeypatch, closed_over):
    hooks, stock, ready = _Loads(), pxla.ExecuteReplicated.__call__, []
    ref = jax.new_ref(jnp.asarray(_ONES))

    def is_ready():
        ready.append(ref._refs._buf.is_ready())

    def run(self, *args):
        results = stock(self, *args)
        is_ready()
        return results

    def of_argument(ref):
        ref[...] = _long(ref[...])

    hooks.at_end = is_ready
    monkeypatch.setattr(pxla.ExecuteReplicated, "__call__", loading.first_runs_apart(hooks, run))  # type: ignore[arg-type]
    jax.jit(lambda: of_argument(ref))() if closed_over else jax.jit(of_argument)(ref)
    assert ready == [False, True], "at the return of the launch, and at the section's end"
    monkeypatch.undo()
    assert np.all(ref[...] == 2)


def test_compilation_is_apart(monkeypatch):
    hooks = _Loads()
    hooks.compiled = lambda module: True  # type: ignore[attr-defined]
    seen = []
    stock = compiler.compile_or_get_cached

    def watched(*args, **kwargs):
        seen.append(hooks.open)
        return stock(*args, **kwargs)

    monkeypatch.setattr(compiler, "compile_or_get_cached", compiling.reporting(hooks, watched))  # type: ignore[arg-type]
    jax.jit(lambda x: x * 43 + 1).lower(jnp.float32(1)).compile()
    assert seen == [1] and hooks.seen == [jax.local_devices()[:1]]


def test_install_and_uninstall_leave_stock_jax():
    class Hooks:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked for without a spanning axis")

    watched = {
        "extend": lambda: shard_map_lib._extend_axis_env,
        "module": lambda: mlir.lower_jaxpr_to_module,
        "psum": lambda: mlir._lowerings[parallel.psum_p],
        "first runs": lambda: pxla.ExecuteReplicated.__call__,
        "hoisting": lambda: loops._scan_known_hoisting,
        "uncacheable": lambda: frozenset(mlir._uncacheable_primitives),
        "broadcast": lambda: mlir._lowerings.get(parallel.pbroadcast_p),
        "gather": lambda: {p: t.get(parallel.all_gather_p) for p, t in mlir._platform_specific_lowerings.items()},
    }
    before = {k: f() for k, f in watched.items()}
    _compat.install(Hooks())  # type: ignore[arg-type]
    try:
        assert {k for k, f in watched.items() if f() != before[k]} == set(watched)
        with pytest.raises(RuntimeError, match="installed already"):
            _compat.install(Hooks())  # type: ignore[arg-type]
    finally:
        _compat.uninstall()
    assert {k: f() for k, f in watched.items()} == before


def test_per_device_programs_have_what_they_need():
    """custom_partitioning's operation and the marks of a sync."""
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def f(x):
        return x

    f.def_partition(lambda *_: None, sharding_rule="i -> i", decode_shardings=False)
    devices = jax.devices()
    assert _compat.devices_of(jax.sharding.SingleDeviceSharding(devices[0])) == (devices[0],)
    assert mesh_lib.empty_abstract_mesh.empty
    jaxpr = jax.make_jaxpr(lambda x: _compat.chain_end(_compat.chain_begin(), [x], 2**64 - 1))(1.0)
    assert [str(e.primitive) for e in jaxpr.eqns] == [_compat.CHAIN_BEGIN, _compat.CHAIN_END]
