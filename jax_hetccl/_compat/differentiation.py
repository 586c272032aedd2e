"""While JAX differentiates: cotangents that enter a shard_map from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import ad

from jax_hetccl._compat.base import as_tuple
from jax_hetccl._compat.hooks import Hooks


def transpose(hooks: Hooks, stock: Callable[..., Any], out_cts: Any, *args: Any, **params: Any) -> Any:
    """A shard_map's transpose, with each cotangent from outside given its global meaning."""
    mesh, check_vma, manual = params["mesh"], params["check_vma"], params["newly_manual_axes"]

    def enter(spec: Any, ct: Any) -> Any:
        if type(ct) is ad.Zero or getattr(ct, "dtype", None) == jax.dtypes.float0 or spec in _residual_specs.values():
            return ct
        mentioned = frozenset(a for part in _ct_spec(spec) if part is not None for a in as_tuple(part))
        factor = hooks.cotangent(mesh, frozenset(manual), mentioned, check_vma)
        return ct if factor == 1 else ct * np.asarray(factor, ct.dtype)

    out_cts = [enter(spec, ct) for spec, ct in zip(params["out_specs"], out_cts, strict=True)]
    return stock(out_cts, *args, **params)


# The specs of residuals: like any other, but not the same object (JAX compares specs by identity).
_residual_specs: dict[Any, Any] = {}


def residual_spec(aval: Any, hooks: Hooks, stock: Callable[..., Any], mesh: Any, check_vma: bool, names: Any) -> Any:
    """The spec that JAX gives a residual that it takes out of a shard_map on its own.

    It looks like that of a user's output sharded over all axes, but its cotangent comes from another shard_map of the
    same differentiation and has its global meaning.
    """
    spec = stock(aval, mesh, check_vma, names)
    if not any(hooks.spans(a) for a in mesh.axis_names):
        return spec
    if spec not in _residual_specs:
        twin = object.__new__(type(spec))
        for slot in type(spec).__slots__:
            if slot != "__weakref__":
                object.__setattr__(twin, slot, getattr(spec, slot))
        _residual_specs[spec] = twin
    return _residual_specs[spec]


def _ct_spec(spec: Any) -> tuple[Any, ...]:
    spec = spec.to_ct_spec() if hasattr(spec, "to_ct_spec") else spec
    return tuple(spec)
