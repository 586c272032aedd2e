"""Which platform each cluster of a test's world runs on.

``HETCCL_TEST_PLATFORMS=cuda,cpu``, one for each cluster in order: the tests whose worlds have that many clusters run
on these platforms, and a layout that this machine does not have the devices for is skipped with that reason. Clusters
may share a GPU, as under CUDA MPS; the devices of one cluster are different ones. Unset: CPU devices everywhere.
The oracle always is stock JAX on CPU devices.

The variable is taken out of the environment when the tests start: jax_hetccl refuses settings under its prefix that it
does not know.
"""

from __future__ import annotations

import ctypes
import functools
import os

import pytest

from harness.layout import Layout

VALID = ("cpu", "cuda", "rocm")
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
_DRIVERS = {
    "cuda": ("libcuda.so.1", "cuInit", "cuDeviceGetCount"),
    "rocm": ("libamdhip64.so", "hipInit", "hipGetDeviceCount"),
}


def parse(text: str) -> tuple[str, ...]:
    """The platforms in the variable's value; an error that lists the valid ones."""
    found = tuple(p.strip() for p in text.split(",") if p.strip())
    if wrong := [p for p in found if p not in VALID]:
        raise ValueError(f"HETCCL_TEST_PLATFORMS: {', '.join(wrong)}; valid: {', '.join(VALID)}")
    return found


_found = parse(os.environ.pop("HETCCL_TEST_PLATFORMS", ""))


def chosen() -> tuple[str, ...]:
    """The platform of each cluster, or an empty tuple: CPU devices everywhere."""
    return _found


def on_gpu(cluster: int) -> bool:
    """Whether a cluster runs on GPUs."""
    return cluster < len(_found) and _found[cluster] != "cpu"


def differ() -> bool:
    """Whether clusters are compiled by different compilers, so that equal programs may round differently."""
    return len(set(_found)) > 1


def any_gpu() -> bool:
    """Whether a cluster is compiled by another compiler than the oracle."""
    return any(platform != "cpu" for platform in _found)


@functools.cache
def count(platform: str) -> int:
    """How many GPUs this process could use."""
    library, init, query = _DRIVERS[platform]
    visible, found = os.environ.get(_VISIBLE[platform]), ctypes.c_int(0)
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    if getattr(driver, init)(0) or getattr(driver, query)(ctypes.byref(found)):
        return 0
    return found.value if visible is None else min(found.value, len([v for v in visible.split(",") if v]))


def missing(layout: Layout, platforms: tuple[str, ...], available: dict[str, int]) -> str | None:
    """Why a layout cannot run on these platforms, or None.

    Args:
        layout: clusters and their devices.
        platforms: of the clusters.
        available: GPUs of each platform.
    """
    if len(layout.clusters) != len(platforms):
        return f"{layout} has {len(layout.clusters)} clusters, HETCCL_TEST_PLATFORMS names {len(platforms)}"
    for devices, platform in zip(layout.devices, platforms, strict=True):
        if platform != "cpu" and devices > available[platform]:
            return f"{layout} needs {devices} {platform} devices in one cluster, this machine has {available[platform]}"
    return None


def environment(layout: Layout, cluster: int, process: int) -> dict[str, str]:
    """The variables that put one process of a world on its devices; skips the test if they do not exist."""
    devices = layout.clusters[cluster][process]
    if not _found or (len(_found) == len(layout.clusters) and _found[cluster] == "cpu"):
        return _on_host(devices)
    reason = missing(layout, _found, {p: count(p) for p in set(_found) - {"cpu"}})
    if reason:
        pytest.skip(reason)
    platform = _found[cluster]
    # Clusters begin on different GPUs as far as there are enough, and share them otherwise.
    same = [c for c in range(cluster) if _found[c] == platform]
    first = sum(layout.devices[c] for c in same) + sum(layout.clusters[cluster][:process])
    indices = [str((first + i) % count(platform)) for i in range(devices)]
    if os.environ.get(_VISIBLE[platform]):
        visible = [v for v in os.environ[_VISIBLE[platform]].split(",") if v]
        indices = [visible[int(i)] for i in indices]
    return {
        "JAX_PLATFORMS": f"{platform},cpu",
        _VISIBLE[platform]: ",".join(indices),
        # Processes that share a GPU leave each other memory, and choose the same algorithms.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        # A case that is meant to fail must not take the worker with it; what ends a process is tested over the twin.
        "HETCCL_ON_INTEGER_FAILURE": "raise",
        # The oracle multiplies in float32; a GPU's default may be a shorter format.
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }


def _on_host(devices: int) -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
