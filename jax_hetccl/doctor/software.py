"""Python, JAX, the native module, the compiler."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import shutil

from jax_hetccl._config import lookup
from jax_hetccl._errors import ConfigError
from jax_hetccl.doctor.check import BAD, GOOD, NOTE, Check

# As in pyproject.toml, for people who installed without its checks.
OLDEST, NEWEST = (0, 10, 2), (0, 13)
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin", "jax-rocm60-plugin")


def software_checks() -> list[Check]:
    return [
        Check("python", platform.python_version()),
        jax_check(_version("jax"), _version("jaxlib")),
        plugin_check({p: v for p in PLUGINS if (v := _version(p))}, _version("jax")),
        _native(),
        _tls(),
        _compiler(),
    ]


def jax_check(jax: str | None, jaxlib: str | None) -> Check:
    """Whether this version of JAX is one whose private names we know."""
    if jax is None:
        return Check("jax", "not installed", BAD, "pip install jax")
    release = tuple(int(n) for n in re.findall(r"\d+", jax)[:3])
    found = f"jax {jax}, jaxlib {jaxlib}"
    if OLDEST <= release < NEWEST:
        return Check("jax", found)
    return Check("jax", found, BAD, "pip install 'jax>=0.10.2,<0.13': jax_hetccl builds on names that JAX may move")


def plugin_check(plugins: dict[str, str], jax: str | None) -> Check:
    """Whether JAX can use GPUs here."""
    if not plugins:
        return Check(
            "jax plugins", "none: CPU devices only", NOTE, "for GPUs: pip install 'jax[cuda13]' (or ROCm's wheels)"
        )
    found = ", ".join(f"{name} {version}" for name, version in plugins.items())
    stale = [v for v in plugins.values() if v.split(".")[:2] != (jax or "").split(".")[:2]]
    if stale:
        return Check("jax plugins", f"{found}, but jax is {jax}", BAD, "install the plugin of the same version as jax")
    return Check("jax plugins", found)


def _native() -> Check:
    try:
        native = importlib.import_module("jax_hetccl._native")
    except ImportError as error:
        return Check("native module", f"cannot be loaded: {error}", BAD, "pip install . (needs a C++17 compiler)")
    platforms = ", ".join(name for name in ("cpu", "CUDA", "ROCM") if native.registrations(name))
    return Check("native module", f"wire protocol {native.protocol_version()}, handlers for {platforms}")


def _tls() -> Check:
    """What HETCCL_TLS=1 uses, or would use."""
    try:
        wanted = lookup("tls").get("tls", False)
    except ConfigError as error:
        return Check("TLS", str(error).splitlines()[1].strip(" -"), BAD, "correct or unset the variable")
    try:
        native = importlib.import_module("jax_hetccl._native")
    except ImportError:
        return Check("TLS", "not looked for: no native module", NOTE, "see above")
    try:
        library = native.tls_library()
    except RuntimeError as error:
        why = str(error).removeprefix("hetccl: no TLS: ")
        if wanted:
            return Check(
                "TLS", why, BAD, "HETCCL_TLS=1 is set: apt-get install libssl3, or set HETCCL_TLS=0 everywhere"
            )
        return Check("TLS", why, NOTE, "needed for HETCCL_TLS=1 only")
    missing = native.kernel_tls_missing()
    sends = f"OpenSSL sends, not the kernel ({missing})" if missing else "the kernel sends"
    return Check("TLS", f"{library}, for HETCCL_TLS=1; {sends}")


def _compiler() -> Check:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        return Check("C++ compiler", "none", NOTE, "needed to build from source only: apt-get install g++")
    return Check("C++ compiler", found, GOOD)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
