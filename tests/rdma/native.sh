#!/usr/bin/env bash
# Runs the C++ tests of RDMA, some of which need two ports, where those are: on a machine with two, or in a kernel with rxe0 and rxe1.
#
#   bazel build --config=plain --config=together //xla_ffi/transport/...
#   tests/rdma/native.sh "$(bazel info bazel-bin)" [--gtest_...]
#
# HETCCL_TEST_LINK_DOWN and _UP: commands that take the second port's link down and up; by default those for vethB if it
# is there. HETCCL_TEST_DMABUF_SHIM: a library to preload that adds ibv_reg_dmabuf_mr to a provider that lacks it.
set -uo pipefail
bin=$(cd "$1" && pwd); shift
if [[ -d /sys/class/net/vethB ]]; then
  : "${HETCCL_TEST_LINK_DOWN:=ip link set vethB down}" "${HETCCL_TEST_LINK_UP:=ip link set vethB up; sleep 0.3}"
  export HETCCL_TEST_LINK_DOWN HETCCL_TEST_LINK_UP
fi
failed=0
run() {
  local binary=$bin/xla_ffi/transport/$1; shift
  # Test twins are found from the folder that Bazel runs tests in.
  (cd "$binary.runfiles/jax_hetccl" && LD_PRELOAD=${HETCCL_TEST_DMABUF_SHIM:-} "$binary" "$@") || failed=1
}
run testing/conformance_test --gtest_filter='*rdma*' "$@"
run rdma/tests_together "$@"
exit $failed
