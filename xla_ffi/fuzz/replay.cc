// Runs a target over saved inputs, where there is no libFuzzer: each as it is, and cut short at
// every place, since a peer may end anywhere.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", argv[i]);
      return 1;
    }
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    // Cuts of long inputs are taken at larger steps.
    const size_t step = 1 + bytes.size() / 512;
    for (size_t size = 0; size <= bytes.size(); size += step) {
      // On the heap and of exactly this size, so that AddressSanitizer sees a read beyond it.
      const std::vector<uint8_t> input(bytes.begin(), bytes.begin() + size);
      LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    const std::vector<uint8_t> input(bytes.begin(), bytes.end());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%d inputs\n", argc - 1);
  return argc > 1 ? 0 : 1;
}
