"""The table of cases, one module per subject. Importing this package registers all of them."""

import importlib

MODULES = (
    "ops",
    "dtypes",
    "sizes",
    "autodiff",
    "transforms",
    "order",
    "meshes",
    "refusals",
    "stock_hlo",
    "failing",
    "drawn",
    "surface",
    "collectives",
    "groups",
    "broadcasts",
    "alone",
    "p2p",
    "wire",
    "central",
    "local",
    "batch",
    "conform_reduce",
    "conform_move",
    "conform_autodiff",
    "conform_vmap",
    "conform_control",
    "conform_meshes",
    "conform_calls",
    "conform_rejects",
)


def load() -> None:
    """Imports every module of cases."""
    for name in MODULES:
        importlib.import_module(f"cases.{name}")
