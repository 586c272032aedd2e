"""A repository with XLA's FFI headers, taken from an installed jaxlib."""

_FIND = "import importlib.util, os; print(os.path.join(os.path.dirname(importlib.util.find_spec('jaxlib').origin), 'include'))"

_WITH = """
cc_library(
    name = "ffi",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    # As a system directory: warnings in foreign headers are not ours.
    copts = [],
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _xla_headers_impl(ctx):
    python = ctx.os.environ.get("HETCCL_PYTHON", "python3")
    path = python if python.startswith("/") else ctx.which(python)
    found = False
    if path:
        result = ctx.execute([path, "-c", _FIND])
        include = result.stdout.strip()
        if result.return_code == 0 and ctx.path(include + "/xla/ffi/api/ffi.h").exists:
            ctx.symlink(include, "include")
            found = True
    ctx.file("BUILD.bazel", _WITH if found else "")
    ctx.file("defs.bzl", "HAVE_XLA_HEADERS = %s\n" % found)

xla_headers = repository_rule(
    implementation = _xla_headers_impl,
    environ = ["HETCCL_PYTHON", "PATH"],
    local = True,
    doc = "Looks for jaxlib in the Python that HETCCL_PYTHON names (default: python3).",
)
