"""What the tables of cases ask of XLA's compiler for CPUs: code that is soon ready, since most of it runs once.

Compiling takes most of the time of these tests, and most of that goes into LLVM, behind everything that could tell one
order of exchanges from another: XLA's own passes stay as they are. ``--soak`` compiles as users do, and so does the
demo where it is run by itself.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping

_quick = True
_EVERYWHERE = "--xla_backend_optimization_level=0"  # every supported version knows it


def choose(quick: bool) -> None:
    """Says how the workers that start from now on compile."""
    global _quick
    _quick = quick


def quick() -> bool:
    """Whether workers compile quickly."""
    return _quick


def flags(jaxlib: str) -> str:
    """The XLA_FLAGS that make this version's compiler quick; an unknown one would end the process.

    Args:
        jaxlib: its version, such as ``"0.10.2"``.
    """
    found = _EVERYWHERE
    if tuple(map(int, jaxlib.split(".")[:2])) < (0, 11):
        # The emitters of today take half of the compiler's time; newer versions have no others.
        found += " --xla_cpu_use_fusion_emitters=false"
        # Nor are small programs worth an LLVM module for each of 32 parts.
        found += " --xla_cpu_parallel_codegen_split_count=1"
    return found


def hurried(environ: Mapping[str, str], mixed: bool = False) -> dict[str, str]:
    """An environment in which programs compile quickly for CPUs, unless ``--soak`` is given.

    Args:
        environ: what to add to.
        mixed: other versions of jaxlib than this process's read it, too.
    """
    if not _quick:
        return dict(environ)
    added = _EVERYWHERE if mixed else flags(importlib.metadata.version("jaxlib"))
    return {**environ, "XLA_FLAGS": f"{environ.get('XLA_FLAGS', '')} {added}".strip()}


def hurry() -> None:
    """Makes this process compile quickly for CPUs; call it before jax makes a backend."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        os.environ.update(hurried(os.environ))
