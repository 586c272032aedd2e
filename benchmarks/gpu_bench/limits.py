"""What one GPU's link can do: pinned copies one way and both ways, through the CUDA driver itself.

As a module it is a child: ``{"bytes": n, "reps": k, "way": "d2h" | "h2d" | "both"}`` gives the seconds of each copy (of
each pair of copies at once for "both").
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from gpu_bench.children import serve

MAX_BYTES = 256 << 20


class Driver:
    """The few calls that are needed; every one that fails raises with CUDA's name of the error."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'?').decode()}")


class Link:
    """Two streams, two device buffers and two pinned host buffers on device 0."""

    def __init__(self) -> None:
        self._cuda = Driver()
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._cuda("cuInit", 0)
        self._cuda("cuDeviceGet", ctypes.byref(device), 0)
        self._cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._cuda("cuCtxSetCurrent", context)
        self._streams = [ctypes.c_void_p() for _ in range(2)]
        self._device = [ctypes.c_uint64() for _ in range(2)]
        self._host = [ctypes.c_void_p() for _ in range(2)]
        for i in range(2):
            self._cuda("cuStreamCreate", ctypes.byref(self._streams[i]), 1)
            self._cuda("cuMemAlloc_v2", ctypes.byref(self._device[i]), ctypes.c_size_t(MAX_BYTES))
            self._cuda("cuMemAllocHost_v2", ctypes.byref(self._host[i]), ctypes.c_size_t(MAX_BYTES))
            ctypes.memset(self._host[i], 1, MAX_BYTES)

    def copy(self, way: str, nbytes: int) -> float:
        """Seconds of one copy, or of one each way at once."""
        size = ctypes.c_size_t(nbytes)
        begin = time.perf_counter()
        if way in ("d2h", "both"):
            self._cuda("cuMemcpyDtoHAsync_v2", self._host[0], self._device[0], size, self._streams[0])
        if way in ("h2d", "both"):
            self._cuda("cuMemcpyHtoDAsync_v2", self._device[1], self._host[1], size, self._streams[1])
        for stream in self._streams:
            self._cuda("cuStreamSynchronize", stream)
        return time.perf_counter() - begin


def main() -> None:
    link = Link()
    serve({}, lambda r: {"times": [link.copy(r["way"], r["bytes"]) for _ in range(r["reps"])]})


if __name__ == "__main__":
    main()
