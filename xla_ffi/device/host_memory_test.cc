#include "xla_ffi/device/host_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace hetccl::device {
namespace {

TEST(PreferHugePages, NeverChangesContents) {
  for (size_t bytes : {size_t{0}, size_t{100}, kHugePagesFrom - 1, size_t{9} << 20}) {
    std::vector<unsigned char> data(bytes, 0x5A);
    PreferHugePages(data.data() + (bytes > 3 ? 3 : 0), bytes > 3 ? bytes - 3 : bytes);
    for (unsigned char byte : data) ASSERT_EQ(byte, 0x5A);
  }
}

// The sanitizers bring an allocator of their own.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// How much of the pages that a freed buffer had must be faulted in again by the next one.
long FaultsOfTheSecondBuffer(size_t bytes) {
  long faults = 0;
  std::thread([&] {  // as XLA's buffers are
    rusage before, after;
    for (int i = 0; i < 3; ++i) {
      ::getrusage(RUSAGE_THREAD, &before);
      std::unique_ptr<char[]> buffer(new char[bytes]);
      for (size_t at = 0; at < bytes; at += 4096) {
        static_cast<volatile char*>(buffer.get())[at] = 1;
      }
      ::getrusage(RUSAGE_THREAD, &after);
    }
    faults = after.ru_minflt - before.ru_minflt;
  })
      .join();
  return faults;
}

TEST(KeepFreedMemory, SparesTheNextBufferItsPageFaults) {
  ASSERT_TRUE(KeepFreedMemory(size_t{256} << 20));
  EXPECT_LT(FaultsOfTheSecondBuffer(size_t{40} << 20), 100);
  EXPECT_LT(FaultsOfTheSecondBuffer(size_t{100} << 20), 100);
}
#endif

}  // namespace
}  // namespace hetccl::device
