#include "xla_ffi/exchange/on_streams.h"

#include <algorithm>
#include <iterator>
#include <utility>

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
  std::vector<Started> dead;  // freed behind the lock: their marks go back under another one
  std::lock_guard<std::mutex> lock(mutex_);
  auto& plans = started_[device];
  for (auto plan = plans.begin(); plan != plans.end();) {
    std::deque<Started>& waiting = plan->second;
    for (auto one = waiting.begin(); one != waiting.end();) {
      if (!Overlap(one->receives, receives) && !Overlap(one->receives, sends) &&
          !Overlap(one->sends, receives)) {
        ++one;
        continue;
      }
      bool failed = false;
      if (!one->exchange->Complete(&failed)) return one->exchange;
      dead.push_back(std::move(*one));
      one = waiting.erase(one);
    }
    plan = waiting.empty() ? plans.erase(plan) : std::next(plan);
  }
  return nullptr;
}

void OnStreams::Add(int device, std::shared_ptr<Exchange> exchange, Buffers sends,
                    Buffers receives) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t plan = exchange->plan().id();
  started_[device][plan].push_back({std::move(exchange), std::move(sends), std::move(receives)});
}

std::shared_ptr<Exchange> OnStreams::Take(int device, uint64_t plan,
                                          const std::vector<const void*>& receives,
                                          const std::vector<const void*>& sends) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& plans = started_[device];
  const auto queue = plans.find(plan);
  if (queue == plans.end()) return nullptr;
  std::deque<Started>& waiting = queue->second;
  auto match = std::find_if(waiting.begin(), waiting.end(), [&](const Started& one) {
    return one.exchange->receive_addresses == receives && one.exchange->send_addresses == sends;
  });
  if (match == waiting.end()) match = waiting.begin();
  std::shared_ptr<Exchange> exchange = std::move(match->exchange);
  waiting.erase(match);
  if (waiting.empty()) plans.erase(queue);
  return exchange;
}

}  // namespace hetccl
