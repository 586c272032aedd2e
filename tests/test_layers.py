"""Dependencies between Python modules point down, and private JAX names stay in one package."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "jax_hetccl"
MODULES = {
    ".".join(p.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__"): p
    for p in sorted(PACKAGE.rglob("*.py"))
}


# Bottom to top. A module may import lower layers and its own group; groups of one layer do not know each other.
LAYERS: list[set[str]] = [
    {"_errors", "_secret", "_host", "_values", "_compat", "_native", "gpus", "plan"},
    {"rdma"},
    {"_config", "_limits", "exchange", "group_plan", "portions", "resuming"},
    {"rendezvous"},
    {"island", "connect", "routes", "failure", "unready", "_engines", "forking"},
    {"tables"},
    {"_world"},
    {"agreement", "loading", "_reform"},
    {"decompose", "ordering"},
    {"syncing"},
    {"spanning"},
    {"session"},
    {"_broadcast", "_barrier", "_batches", "_sync", "collectives", "p2p"},
    {"_replicas"},
    {"_snapshots", "optax"},
    {""},  # the public names
    {"launch", "doctor", "integrations"},
    {"demo"},
    {"cli"},
]
# May import the standard library and numpy, nothing else: they are tested as plain functions.
PURE = ("plan", "group_plan", "ordering.overlap", "ordering.schedule", "syncing.shares", "_values")
PURE += ("rdma.hca", "rdma.ports", "rdma.places", "rdma.choose", "resuming", "portions")


def _group(module: str) -> str:
    return module.split(".")[0]


def _imports(module: str) -> set[str]:
    """Modules of this package that a module imports, anywhere in its text."""
    found: set[str] = set()
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(["jax_hetccl", *filter(None, up)]) if node.level else ""
            full = ".".join(filter(None, (base, node.module)))
            names = [f"{full}.{a.name}" for a in node.names]
        for name in names:
            if name.split(".")[0] == "jax_hetccl":
                found.add(_resolve(name.removeprefix("jax_hetccl").lstrip(".")))
    return found - {module}


def _resolve(name: str) -> str:
    """The module that a dotted name belongs to: the longest prefix that is one."""
    while name not in MODULES and name.split(".")[0] != "_native":
        name = name.rpartition(".")[0]
    return "_native" if name.startswith("_native") else name


def _level(module: str) -> int:
    return next(i for i, groups in enumerate(LAYERS) if _group(module) in groups)


def test_every_module_has_a_layer() -> None:
    known = set().union(*LAYERS)
    assert not (missing := {m for m in MODULES if _group(m) not in known}), f"give these a layer: {sorted(missing)}"


def test_dependencies_point_down() -> None:
    wrong = [
        f"{module} imports {other or 'jax_hetccl'}"
        for module in MODULES
        for other in _imports(module)
        if _group(other) != _group(module) and _level(other) >= _level(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycles() -> None:
    graph = {m: {o for o in _imports(m) if o in MODULES and MODULES[o].name != "__init__.py"} for m in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "cycle: " + " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_pure_modules() -> None:
    for module in PURE:
        text = MODULES[module].read_text()
        roots = {a.name.split(".")[0] for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names}
        roots |= {(n.module or "").split(".")[0] for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
        allowed = set(sys.stdlib_module_names) | {"numpy", "jax_hetccl"}
        assert roots <= allowed, f"{module} imports {sorted(roots - allowed)}"
        assert all(_group(o) in ("_errors", *map(_group, PURE)) for o in _imports(module)), (
            f"{module}: {_imports(module)}"
        )


def test_private_jax_names_only_in_compat() -> None:
    private = re.compile(
        r"\bjax\._src\b|\bjaxlib\._jax\b|\bjax\.interpreters\b|from jax import .*\binterpreters\b|\bimport jaxlib\b"
    )
    found = [
        f"{path.relative_to(PACKAGE)}:{n}: {line.strip()}"
        for path in MODULES.values()
        if path.parent.name != "_compat"
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
