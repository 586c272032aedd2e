"""C++ libraries and tests, compiled file by file or a package at a time.

Most of the compiler's time goes into headers. By default each file is compiled by itself, which also shows whether it
includes what it needs. With --config=together (asan and tsan have it, and CI) all files of a library are one translation
unit, about as in the wheel, and all tests of a package are one, in one program with as many shards as the tests alone would have:
half of the time. What that asks of the code: names in the unnamed namespaces of a package are given once.
"""

_TOGETHER = "//bazel:together"

def _unit(name, sources, testonly):
    """One file that includes all of them."""
    lines = ["#include \\\"%s/%s\\\"" % (native.package_name(), source) for source in sources]
    native.genrule(
        name = name,
        testonly = testonly,
        outs = [name + ".cc"],
        cmd = "printf '%s\\n' " + " ".join(["\"%s\"" % line for line in lines]) + " >$@",
        visibility = ["//visibility:private"],
    )

def hetccl_library(name, srcs, testonly = None, **kwargs):
    """A cc_library.

    Args:
      name: that of the library.
      srcs: its *.cc, and headers that are its own.
      testonly: as in cc_library.
      **kwargs: all else is cc_library's.
    """
    sources = [source for source in srcs if source.endswith(".cc")]
    headers = [source for source in srcs if not source.endswith(".cc")]
    _unit(name + "_together", sources, testonly)
    native.cc_library(
        name = name,
        testonly = testonly,
        srcs = headers + select({
            _TOGETHER: [name + "_together.cc"],
            "//conditions:default": sources,
        }),
        textual_hdrs = select({
            _TOGETHER: sources,
            "//conditions:default": [],
        }),
        **kwargs
    )

def hetccl_tests(srcs, deps, headers = [], shards = {}, size = "small", alone = []):
    """One test for each of srcs, or one for all.

    Both exist; which of the two is built is a matter of tags, see .bazelrc.

    Args:
      srcs: *_test.cc.
      deps: of all tests, besides googletest.
      headers: of the tests' own.
      shards: in how many processes a test runs, by source, if not in one.
      size: of each test.
      alone: those of srcs that need a process that nothing else has run in.
    """
    for source in srcs:
        native.cc_test(
            name = source[:-len(".cc")],
            size = size,
            srcs = [source] + headers,
            shard_count = shards.get(source, 1),
            tags = [] if source in alone else ["apart"],
            deps = deps + ["@googletest//:gtest_main"],
        )
    together = [source for source in srcs if source not in alone]
    if not together:
        return
    _unit("tests_together_test", together, True)

    # What a test includes as text can only come from a library.
    native.cc_library(
        name = "tests_together_sources",
        testonly = True,
        textual_hdrs = together,
        visibility = ["//visibility:private"],
    )
    processes = 0
    for source in together:
        processes += shards.get(source, 1)
    native.cc_test(
        name = "tests_together",
        size = "medium",
        srcs = ["tests_together_test.cc"] + headers,
        shard_count = processes,
        tags = ["together"],
        deps = deps + [
            ":tests_together_sources",
            "@googletest//:gtest_main",
        ],
    )
