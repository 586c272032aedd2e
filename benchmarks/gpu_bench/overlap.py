"""Does an exchange that is started early overlap with matrix products between its start and its done?

Three programs: the exchange alone, the products alone, and both, the result of the exchange used behind the products.
"""

from __future__ import annotations

import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_hetccl as hetccl
from gpu_bench import programs


def functions(nbytes: int, side: int, products: int) -> tuple[dict[str, Callable[..., Any]], tuple[Any, Any]]:
    """The three programs and their operands.

    Args:
      nbytes: of the exchange.
      side: of the square matrices.
      products: how many.
    """
    x = programs.operand(nbytes, hetccl.world().cluster)
    a = jnp.full((side, side), 1 / side, jnp.bfloat16)

    def chain(a: Any) -> Any:
        b = a
        for _ in range(products):
            b = b @ a
        return b

    def jitted(f: Callable[..., Any], out: Any) -> Any:
        mapped = jax.shard_map(f, mesh=programs.mesh(), in_specs=(P("data"), P()), out_specs=out, check_vma=False)
        return jax.jit(mapped)

    made = {
        "exchange": jitted(lambda x, a: lax.psum(x * 2, "data"), P()),
        "products": jitted(lambda x, a: chain(a), P()),
        "both": jitted(lambda x, a: (lax.psum(x * 2, "data"), chain(a)), (P(), P())),
    }
    return made, (x, a)


def measure(nbytes: int, side: int, products: int, reps: int) -> dict[str, Any]:
    """Seconds of the three programs (medians of ``reps``), and the order in which XLA runs their parts."""
    made, operands = functions(nbytes, side, products)
    result: dict[str, Any] = {"bytes": nbytes, "side": side, "products": products}
    result["order"] = order(made["both"].lower(*operands).compile().as_text())
    for name, f in made.items():
        jax.block_until_ready(f(*operands))
        seconds = []
        for i in range(reps + 2):
            hetccl.barrier("benchmark")
            begin = time.perf_counter()
            jax.block_until_ready(f(*operands))
            if i >= 2:
                seconds.append(time.perf_counter() - begin)
        result[name] = statistics.median(seconds)
    return {"result": result}


def measure_profile(nbytes: int, side: int, products: int, reps: int) -> dict[str, Any]:
    """What a profile of the program with both shows."""
    made, operands = functions(nbytes, side, products)
    jax.block_until_ready(made["both"](*operands))
    return {"result": profile(lambda: jax.block_until_ready(made["both"](*operands)))}


def order(text: str) -> str:
    """The order in a compiled program: S start, D done, g a matrix product."""
    found = []
    for line in text.splitlines():
        if "=" not in line:
            continue
        if '"hetccl_exchange_start"' in line:
            found.append("S")
        elif '"hetccl_exchange_done"' in line:
            found.append("D")
        elif re.search(r"__cublas|__triton|triton_gemm| dot\(|__onednn", line):
            found.append("g")
    return "".join(found)


def profile(run: Callable[[], Any]) -> dict[str, Any]:
    """How long a device copied, computed, and did both at once in one run, from a JAX profile; or why not."""
    hetccl.barrier("benchmark")
    with tempfile.TemporaryDirectory() as directory:
        try:
            with jax.profiler.trace(directory):
                run()
            reader = jax.profiler.ProfileData
        except Exception as error:  # profiling is an addition: the figures stand without it
            return {"skipped": f"{type(error).__name__}: {error}"}
        files = sorted(pathlib.Path(directory).rglob("*.xplane.pb"))
        if not files:
            return {"skipped": "the profiler wrote no trace"}
        copies, kernels = [], []
        for plane in reader.from_file(str(files[0])).planes:
            if "/device:GPU" not in plane.name:
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for e in line.events:
                    span = (e.start_ns, e.start_ns + e.duration_ns)
                    (copies if re.search("memcpy", e.name, re.I) else kernels).append(span)
    if not copies and not kernels:
        return {"skipped": "the trace shows no device"}
    return summary(copies, kernels)


def summary(copies: Iterable[tuple[float, float]], kernels: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds of copying, of computing and of both at once, from spans in nanoseconds."""
    merged = [_merged(copies), _merged(kernels)]
    both = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in merged[0] for b, e in merged[1])
    total = [sum(e - b for b, e in spans) for spans in merged]
    return {"copies_ms": total[0] / 1e6, "kernels_ms": total[1] / 1e6, "both_ms": both / 1e6}


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Overlapping spans as one."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result
