"""Parts of ``benchmarks/gpu.py``: limits of the machine, jitted JAX programs across clusters, Gloo, overlap, report."""

LOOP = 200  # iterations of the programs that run inside a jitted loop
