"""What a case sees: the mesh of this cluster (or of the one oracle world), and the data that belongs to it.

A case is written once, with global data. In the oracle the mesh has all ranks and `Env.put` places the whole array;
in a cluster the mesh has the cluster's own ranks and `Env.put` places the part that these ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from harness.case import MeshSpec

D, M = "data", "model"
_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}


class Env:
    """One run of one case.

    Args:
        cluster: position of this cluster, or None in the oracle.
        devices: devices of each cluster, in order.
        spec: how to make the mesh.
        vma: the check_vma mode of `smap`.
        api: "lax" or "hetccl", the module whose functions `psum` and its kin are.
        params: the case's own parameters.
    """

    def __init__(
        self,
        cluster: int | None,
        devices: tuple[int, ...],
        spec: MeshSpec,
        vma: bool,
        api: str,
        params: Mapping[str, Any],
    ) -> None:
        self.oracle, self.vma, self.params = cluster is None, vma, params
        self._made_of = (cluster, devices, spec, vma, api)
        self.api: Any = lax if self.oracle or api == "lax" else __import__("jax_hetccl")
        self.sizes = tuple(n // spec.per_rank for n in devices)
        self.size = sum(self.sizes)
        mine = (
            slice(0, self.size) if cluster is None else slice(sum(self.sizes[:cluster]), sum(self.sizes[: cluster + 1]))
        )
        self.first, self.count = mine.start, mine.stop - mine.start
        other = dict(spec.other)
        self._local = {a: other.get(a, self.count) for a in spec.axes}
        self._global = {a: other.get(a, self.size) for a in spec.axes}
        use = sum(devices) if cluster is None else devices[cluster]
        chosen = jax.devices()[:use]
        if spec.order == "reversed" and not self.oracle:
            chosen = chosen[::-1]
        self.mesh = Mesh(
            np.array(chosen).reshape(tuple(self._local.values())),
            spec.axes,
            axis_types=(_TYPES[spec.types],) * len(spec.axes),
        )
        self.psum, self.pmean, self.pmax, self.pmin = (getattr(self.api, f) for f in ("psum", "pmean", "pmax", "pmin"))
        self.axis_index, self.axis_size = self.api.axis_index, self.api.axis_size

    def given(self, params: Mapping[str, Any]) -> Env:
        """The same for another case of the same run."""
        return Env(*self._made_of, params)

    def smap(self, f: Callable[..., Any], in_specs: Any, out_specs: Any, **options: Any) -> Callable[..., Any]:
        """shard_map over this mesh in this run's check_vma mode."""
        options = {"mesh": self.mesh, "check_vma": self.vma, **options}
        return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, **options)

    def positions(self) -> dict[jax.Device, int]:
        """Position in the global mesh of each device of this mesh."""
        found = {}
        for at, device in np.ndenumerate(self.mesh.devices):
            found[device] = int(np.ravel_multi_index(self._place(at), tuple(self._global.values())))
        return found

    def _place(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """Global coordinates of local mesh coordinates."""
        return tuple(i + self.first if a == D else i for a, i in zip(self._local, at, strict=True))

    def put(self, value: Any, spec: PartitionSpec) -> jax.Array:
        """Places the part of a global array that belongs to this mesh's ranks."""
        value = np.asarray(value)
        parts = [p if isinstance(p, tuple) else () if p is None else (p,) for p in spec]
        parts += [()] * (value.ndim - len(parts))
        ways = [math.prod(self._global[a] for a in names) for names in parts]
        shape = tuple(
            n // w * math.prod(self._local[a] for a in names)
            for n, w, names in zip(value.shape, ways, parts, strict=True)
        )
        shards = []
        for at, device in np.ndenumerate(self.mesh.devices):
            if device.process_index != jax.process_index():
                continue
            coords = dict(zip(self._local, self._place(at), strict=True))
            index = []
            for n, w, names in zip(value.shape, ways, parts, strict=True):
                where = 0
                for a in names:
                    where = where * self._global[a] + coords[a]
                index.append(slice(where * (n // w), (where + 1) * (n // w)))
            shards.append(jax.device_put(value[tuple(index)], device))
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self.mesh, spec), shards)

    def same(self, value: Any) -> jax.Array:
        """Places a value that every rank holds in full: parameters, closed forms."""
        return self.put(value, PartitionSpec())

    def rows(self, per_rank: int = 4, cols: int = 6, dtype: Any = np.float32, seed: int = 0) -> jax.Array:
        """Rank-unique data whose sums are exact in float32: multiples of 1/4 between -2 and 2, sharded by rows."""
        rng = np.random.default_rng(seed)
        return self.put((rng.integers(-8, 8, (self.size * per_rank, cols)) / 4).astype(dtype), PartitionSpec(D))

    def normal(self, *shape: int, dtype: Any = np.float32, seed: int = 0) -> jax.Array:
        """Rank-unique normal data; the leading dimension counts rows per rank."""
        rng = np.random.default_rng(seed)
        full = (self.size * shape[0], *shape[1:])
        return self.put(rng.standard_normal(full).astype(dtype), PartitionSpec(D, *[None] * (len(shape) - 1)))

    def weights(self, *shape: int, seed: int = 7) -> jax.Array:
        """Parameters: equal on every rank, multiples of 1/4."""
        return self.same((np.random.default_rng(seed).integers(-8, 8, shape) / 4).astype(np.float32))
