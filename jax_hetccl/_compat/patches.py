"""Replacing things in JAX, and putting them back exactly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax._src import core
from jax._src.interpreters import mlir

_undo: list[Callable[[], None]] = []
_stock_rules: dict[core.Primitive, Callable[..., Any]] = {}


def patched() -> bool:
    """Whether anything is replaced now."""
    return bool(_undo)


def undo_all() -> None:
    """Puts back what was replaced, the last first."""
    while _undo:
        _undo.pop()()
    _stock_rules.clear()


def replace(owner: Any, name: str, value: Any) -> None:
    """Replaces an attribute."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, old))


def replace_item(table: Any, key: Any, value: Any) -> None:
    """Replaces an entry of a table."""
    old = table[key]
    table[key] = value
    _undo.append(lambda: table.__setitem__(key, old))


def wrap_lowering(primitive: core.Primitive, wrapper: Callable[..., Any], cacheable: bool) -> None:
    """Registers ``wrapper(stock_rule, ctx, *args, **params)`` wherever the primitive has a lowering rule."""
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    platforms: list[str | None] = [None, *mlir._platform_specific_lowerings]
    for table, platform in zip(tables, platforms, strict=True):
        if primitive not in table:
            continue
        old = table[primitive]
        if platform is None:
            _stock_rules[primitive] = old.rule
        _undo.append(functools.partial(table.__setitem__, primitive, old))
        was_cacheable = primitive not in mlir._uncacheable_primitives
        mlir.register_lowering(
            primitive,
            functools.partial(wrapper, old.rule),
            platform=platform,
            inline=old.inline,
            cacheable=cacheable,
        )
        if was_cacheable and not cacheable:
            _undo.append(functools.partial(mlir._uncacheable_primitives.discard, primitive))


def stock_rule(primitive: core.Primitive) -> Any:
    """A collective's stock rule, past the wrapper that :func:`install` put around it."""
    return _stock_rules.get(primitive) or mlir._lowerings[primitive].rule
