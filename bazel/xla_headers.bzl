"""A repository with XLA's FFI headers, taken from an installed jaxlib."""

_FIND = "import importlib.util, os; print(os.path.join(os.path.dirname(importlib.util.find_spec('jaxlib').origin), 'include'))"

_WITH = """
cc_library(
    name = "ffi",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    # A system directory to the compiler: warnings in foreign headers are not ours.
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _xla_headers_impl(ctx):
    include = ctx.os.environ.get("JAX_HETCCL_XLA_INCLUDE_DIR", "")
    python = ctx.which("python3")
    if not include and python:
        result = ctx.execute([python, "-c", _FIND])
        include = result.stdout.strip() if result.return_code == 0 else ""
    found = include != "" and ctx.path(include + "/xla/ffi/api/ffi.h").exists
    if found:
        ctx.symlink(include, "include")
    ctx.file("BUILD.bazel", _WITH if found else "")
    ctx.file("defs.bzl", "HAVE_XLA_HEADERS = %s\n" % found)

xla_headers = repository_rule(
    implementation = _xla_headers_impl,
    environ = ["JAX_HETCCL_XLA_INCLUDE_DIR", "PATH"],
    local = True,
    doc = "JAX_HETCCL_XLA_INCLUDE_DIR names the directory; without it, the jaxlib of python3 is used if there is one.",
)
