"""A case's result on disk: the shard that each device holds, leaf by leaf, byte by byte."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (gives numpy the small floats' names)
import numpy as np

from harness.env import Env


@dataclasses.dataclass
class Leaf:
    """One leaf of a result, as one process saw it.

    Attributes:
        dtype: name of the dtype; "" for plain values.
        weak: whether JAX calls its type weak.
        shards: position in the global mesh -> value; -1 for plain values, which belong to no device.
        index: position -> which part of the array this is, as text; equal text means equal contents.
    """

    dtype: str
    weak: bool
    shards: dict[int, np.ndarray]
    index: dict[int, str]


def save(tree: Any, env: Env, path: Path) -> list[dict[str, Any]]:
    """Writes the shards that this process can address; returns what `load` needs beside the file."""
    positions, arrays, leaves = env.positions(), {}, []
    for i, (key, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(tree)[0]):
        shards: list[dict[str, Any]] = []
        if isinstance(leaf, jax.Array):
            held = [(positions.get(s.device, -2), str(s.index), np.asarray(s.data)) for s in leaf.addressable_shards]
        else:
            held = [(-1, "", np.asarray(leaf))]
        for position, index, value in held:
            name = f"{i}_{position}"
            twin = next((s["name"] for s in shards if arrays[s["name"]].tobytes() == value.tobytes()), None)
            if twin is None:
                arrays[name] = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
            shards.append({"name": twin or name, "at": position, "index": index, "shape": list(value.shape)})
        dtype = str(held[0][2].dtype)
        leaves.append(
            {
                "key": jax.tree_util.keystr(key),
                "dtype": dtype,
                "weak": bool(getattr(leaf, "weak_type", False)),
                "shards": shards,
            }
        )
    np.savez(path, **arrays)
    return leaves


def load(path: Path, leaves: list[dict[str, Any]]) -> dict[str, Leaf]:
    """Reads what `save` wrote."""
    found = {}
    with np.load(path) as arrays:
        for leaf in leaves:
            dtype = np.dtype(leaf["dtype"])
            values = {s["at"]: arrays[s["name"]].view(dtype).reshape(s["shape"]) for s in leaf["shards"]}
            index = {s["at"]: s["index"] for s in leaf["shards"]}
            found[leaf["key"]] = Leaf(leaf["dtype"], leaf["weak"], values, index)
    return found
