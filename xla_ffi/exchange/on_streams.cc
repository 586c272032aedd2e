#include "xla_ffi/exchange/on_streams.h"

#include <algorithm>

namespace hetccl {
namespace {

bool Overlap(const OnStreams::Buffers& some, const OnStreams::Buffers& others) {
  return std::any_of(some.begin(), some.end(), [&](const BufferView& a) {
    return std::any_of(others.begin(), others.end(), [&](const BufferView& b) {
      return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
    });
  });
}

}  // namespace

std::shared_ptr<Exchange> OnStreams::DropDead(int device, const Buffers& sends,
                                              const Buffers& receives) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [key, waiting] : started_) {
    if (key.first != device) continue;
    for (auto one = waiting.begin(); one != waiting.end();) {
      if (!Overlap(one->receives, receives) && !Overlap(one->receives, sends) &&
          !Overlap(one->sends, receives)) {
        ++one;
        continue;
      }
      bool failed = false;
      if (!one->exchange->Complete(&failed)) return one->exchange;
      one = waiting.erase(one);
    }
  }
  return nullptr;
}

void OnStreams::Add(int device, std::shared_ptr<Exchange> exchange, Buffers sends,
                    Buffers receives) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t plan = exchange->plan().id();
  started_[{device, plan}].push_back({std::move(exchange), std::move(sends), std::move(receives)});
}

std::shared_ptr<Exchange> OnStreams::Take(int device, uint64_t plan,
                                          const std::vector<const void*>& receives,
                                          const std::vector<const void*>& sends) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto queue = started_.find({device, plan});
  if (queue == started_.end() || queue->second.empty()) return nullptr;
  std::deque<Started>& waiting = queue->second;
  auto match = std::find_if(waiting.begin(), waiting.end(), [&](const Started& one) {
    return one.exchange->receive_addresses == receives && one.exchange->send_addresses == sends;
  });
  if (match == waiting.end()) match = waiting.begin();
  std::shared_ptr<Exchange> exchange = std::move(match->exchange);
  waiting.erase(match);
  return exchange;
}

}  // namespace hetccl
