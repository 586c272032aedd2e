"""GPUs as their vendor's Python bindings show them: where they are, and what they can do for exchanges.

The bindings are optional (``pip install 'jax-hetccl[cuda]'`` or ``[rocm]``): the native engine opens the driver itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
from collections.abc import Callable
from typing import Any

# Facts by the driver's attributes; what a driver does not know stays None.
_CUDA = {
    "numa": "HOST_NUMA_ID",
    "stream_memops": "CAN_USE_64_BIT_STREAM_MEM_OPS",
    "dma_buf": "DMA_BUF_SUPPORTED",
    "gpu_direct_rdma": "GPU_DIRECT_RDMA_SUPPORTED",
    "rdma_writes_ordering": "GPU_DIRECT_RDMA_WRITES_ORDERING",
    "rdma_flush_options": "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
}
_HIP = {"stream_memops": "CanUseStreamWaitValue", "dma_buf": "DmaBufSupported", "numa": "HostNumaId"}
EXTRAS = {"cuda": ("cuda-python", "cuda"), "rocm": ("hip-python", "rocm")}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU; None where the driver does not say.

    Attributes:
      ordinal: the driver's number of it in this process.
      pci: its address, such as ``0000:17:00.0``.
      numa: the NUMA node it is attached to, -1 if the machine has none.
      stream_memops: whether streams can wait for memory (1) or not (0).
      dma_buf: whether its memory can be exported to a network card.
      gpu_direct_rdma: whether a network card can reach its memory at all.
      rdma_writes_ordering: how far writes of a network card are ordered: 0 not at all, 100 for this GPU, 200 for all.
      rdma_flush_options: bits: 1 flush by the host, 2 by a stream memory operation.
    """

    ordinal: int
    pci: str | None = None
    numa: int | None = None
    stream_memops: int | None = None
    dma_buf: int | None = None
    gpu_direct_rdma: int | None = None
    rdma_writes_ordering: int | None = None
    rdma_flush_options: int | None = None


class BindingsError(Exception):
    """The vendor's bindings or driver cannot be used; says why and what to do."""


def describe(platform: str, ordinals: list[int] | None = None) -> list[Gpu]:
    """GPUs of a platform.

    Args:
      platform: ``"cuda"`` or ``"rocm"``.
      ordinals: which ones; all that this process may use if None.

    Raises:
      BindingsError: there are no bindings, no driver, or no device.
    """
    package, extra = EXTRAS[platform]
    try:
        driver = _open(platform)
        return [_gpu(driver, o) for o in (range(driver.count) if ordinals is None else ordinals)]
    except ImportError:
        raise BindingsError(f"{package} is not installed: pip install 'jax-hetccl[{extra}]'") from None
    except Exception as error:  # each binding has errors of its own for a missing library
        raise BindingsError(f"{package} cannot use the driver: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Driver:
    count: int
    pci: Callable[[int], str]
    facts: dict[str, Callable[[int], int | None]]


def _open(platform: str) -> _Driver:
    return _cuda() if platform == "cuda" else _hip()


def _cuda() -> _Driver:
    cu = importlib.import_module("cuda.bindings.driver")
    _ok(cu.cuInit(0))

    def pci(ordinal: int) -> str:
        return _text(_ok(cu.cuDeviceGetPCIBusId(32, _ok(cu.cuDeviceGet(ordinal)))))

    def fact(name: str) -> Callable[[int], int | None]:
        attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return lambda ordinal: _maybe(lambda: cu.cuDeviceGetAttribute(attribute, _ok(cu.cuDeviceGet(ordinal))))

    return _Driver(int(_ok(cu.cuDeviceGetCount())), pci, {k: fact(v) for k, v in _CUDA.items()})


def _hip() -> _Driver:
    hip = importlib.import_module("hip").hip

    def fact(name: str) -> Callable[[int], int | None]:
        attribute = getattr(hip.hipDeviceAttribute_t, f"hipDeviceAttribute{name}", None)
        return lambda ordinal: _maybe(lambda: hip.hipDeviceGetAttribute(attribute, ordinal))

    count = int(_ok(hip.hipGetDeviceCount()))
    return _Driver(count, lambda o: _text(_ok(hip.hipDeviceGetPCIBusId(32, o))), {k: fact(v) for k, v in _HIP.items()})


def _gpu(driver: _Driver, ordinal: int) -> Gpu:
    facts = {name: fact(ordinal) for name, fact in driver.facts.items()}
    pci = driver.pci(ordinal).lower()
    node = pathlib.Path("/sys/bus/pci/devices", pci, "numa_node")
    if node.exists():  # what the kernel says is where the copies go
        facts["numa"] = int(node.read_text())
    return Gpu(ordinal, pci, **facts)


def _ok(result: Any) -> Any:
    """The value of a binding's (status, value) answer; RuntimeError if the status is not success."""
    status, *values = result if isinstance(result, tuple) else (result,)
    if int(status) != 0:
        raise RuntimeError(getattr(status, "name", str(status)))
    return values[0] if values else None


def _maybe(query: Callable[[], Any]) -> int | None:
    try:
        return int(_ok(query()))
    except (RuntimeError, TypeError, ValueError):  # a driver or binding older than the attribute
        return None


def _text(value: Any) -> str:
    value = value.decode() if isinstance(value, bytes) else str(value)
    return value.split("\0")[0]
