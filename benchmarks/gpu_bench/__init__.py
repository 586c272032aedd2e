"""Parts of ``benchmarks/gpu.py`` and ``multi_gpu.py``: limits of the machine, jitted JAX programs across clusters and in
stock JAX, Gloo, overlap, training, report."""

KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, 64 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}

LOOPS = (
    "psum_loop",
    "swap_loop",
    "ppermute_loop",
    "send_loop",
    "send_recv_loop",
)  # inside a jitted loop, without dispatch


def iterations(op: str, nbytes: int) -> int:
    """How many operations one run of a program has; an even number in a loop."""
    if op not in LOOPS:
        return 1
    return 200 if nbytes <= 64 << 10 else 8
