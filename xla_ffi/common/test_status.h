// Statuses in tests: what went wrong is in the report.
#ifndef XLA_FFI_COMMON_TEST_STATUS_H_
#define XLA_FFI_COMMON_TEST_STATUS_H_

#include <gtest/gtest.h>

#include "xla_ffi/common/status.h"

#define HETCCL_OK_(verdict, expression)                                \
  do {                                                                 \
    const ::hetccl::Status status_ = (expression);                     \
    verdict(status_.ok()) << #expression << ": " << status_.message(); \
  } while (false)
#define ASSERT_OK(expression) HETCCL_OK_(ASSERT_TRUE, expression)
#define EXPECT_OK(expression) HETCCL_OK_(EXPECT_TRUE, expression)

#endif  // XLA_FFI_COMMON_TEST_STATUS_H_
