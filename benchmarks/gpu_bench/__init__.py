"""Parts of ``benchmarks/gpu.py``: limits of the machine, jitted JAX programs across clusters, Gloo, overlap, report."""

LOOPS = ("psum_loop", "swap_loop", "ppermute_loop", "send_recv_loop")  # inside a jitted loop, without dispatch


def iterations(op: str, nbytes: int) -> int:
    """How many operations one run of a program has; an even number in a loop."""
    if op not in LOOPS:
        return 1
    return 200 if nbytes <= 64 << 10 else 8
