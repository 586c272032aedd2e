"""The table of cases: a case is a function of an `Env`, known by name to every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

ON, OFF = (True,), (False,)
BOTH = (True, False)


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """How a case's mesh is made from a cluster's devices. ``shape`` counts the devices of the other axes."""

    axes: tuple[str, ...] = ("data",)
    other: tuple[tuple[str, int], ...] = ()
    types: str = "auto"
    order: str = "given"

    @property
    def per_rank(self) -> int:
        """Devices that share one position of the spanning axis."""
        n = 1
        for _, size in self.other:
            n *= size
        return n

    @property
    def group(self) -> tuple[int, str]:
        """Meshes of one group can be used in one world."""
        return self.per_rank, self.order


DATA = MeshSpec()
DATA_MODEL = MeshSpec(("data", "model"), (("model", 2),))


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and its arguments: what a case returns that may become a part of a larger program.

    Attributes:
        fn: a function of arrays.
        args: trees of arrays.
        how: "together", as a part of a larger program; "alone", as a program of its own; "eager", without jit.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    how: str = "together"

    def result(self) -> Any:
        """Runs it alone."""
        return (self.fn if self.how == "eager" else jax.jit(self.fn))(*self.args)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program and what is expected of it.

    Attributes:
        name: ``module.function[id]``; workers look it up.
        run: the program; gets an `Env` and returns a tree of arrays (or plain values), or a `Program` that does.
        vma: the check_vma modes in which it runs.
        api: which spellings run: "lax", "hetccl".
        mesh: how its mesh is made.
        params: read by the program through ``env.params``.
        tags: which worlds take it, see `cells`.
        refused: if set, every cluster must raise an error of this class, with all of `says` in its text.
        rejects: the check_vma modes in which stock JAX raises; every process must raise an error of the same class
            then, before it sends anything.
        exact: the values carry no rounding that depends on the compiler, so clusters with different JAX versions
            must agree bit by bit too.
        rounded: leaves of an exact case that are computed from what was exchanged; where compilers differ, so may their
            last bit.
        ranks: the least number of ranks of a world in which it makes sense.
        replicas_only: replicas must have equal bits, but the oracle does not judge their values.
        limit_s: time one run may take.
    """

    name: str
    run: Callable[[Any], Any]
    vma: tuple[bool, ...] = BOTH
    api: tuple[str, ...] = ("lax",)
    mesh: MeshSpec = DATA
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    refused: str | None = None
    says: tuple[str, ...] = ()
    rejects: tuple[bool, ...] = ()
    exact: bool = False
    rounded: tuple[str, ...] = ()
    ranks: int = 1
    replicas_only: bool = False
    limit_s: float = 40.0


CASES: dict[str, Case] = {}


def case(
    *tags: str, table: Mapping[str, Mapping[str, Any]] | None = None, **options: Any
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Registers a function as a case, or as one case for each row of ``table`` (row id -> params or options).

    A row may set any of `Case`'s options under their own names; everything else becomes ``params``.
    """
    fields = {f.name for f in dataclasses.fields(Case)} - {"name", "run", "params", "tags"}

    def register(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        base = f"{fn.__module__.removeprefix('cases.')}.{fn.__name__}"
        for row, values in ({"": {}} if table is None else table).items():
            name = f"{base}[{row}]" if row else base
            own = {k: v for k, v in values.items() if k in fields}
            params = {k: v for k, v in values.items() if k not in fields}
            if name in CASES:
                raise ValueError(f"two cases are named {name}")
            CASES[name] = Case(name=name, run=fn, params=params, tags=frozenset(tags), **{**options, **own})
        return fn

    return register


def module(*names: str) -> list[Case]:
    """All cases of the modules named, in the order in which they were written."""
    return [c for c in CASES.values() if c.name.split(".")[0] in names]
