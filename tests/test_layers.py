"""Dependencies between Python modules point down, and private JAX names stay in one file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "jax_hetccl"
MODULES = {
    ".".join(p.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__"): p
    for p in sorted(PACKAGE.rglob("*.py"))
}


def test_private_jax_names_only_in_compat() -> None:
    private = re.compile(r"\bjax\._src\b|\bjaxlib\._jax\b|\bjax\.interpreters\b|from jax import .*\binterpreters\b|\bimport jaxlib\b")
    found = [
        f"{path.relative_to(PACKAGE)}:{n}: {line.strip()}"
        for path in MODULES.values()
        if path.name != "_compat.py"
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert not found, "\n".join(found)


def test_environment_is_read_in_one_place() -> None:
    reader = re.compile(r"\bos\.environ\b|\bos\.getenv\b")
    allowed = {"_config.py"}
    found = [
        f"{path.relative_to(PACKAGE)}:{n}: {line.strip()}"
        for path in MODULES.values()
        if path.name not in allowed and path.relative_to(PACKAGE).parts[0] not in ("cli", "launch", "demo")
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if reader.search(line)
    ]
    assert not found, "\n".join(found)
