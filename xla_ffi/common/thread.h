// A named thread with one owner.
#ifndef XLA_FFI_COMMON_THREAD_H_
#define XLA_FFI_COMMON_THREAD_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "xla_ffi/common/clock.h"

namespace hetccl {

// Gives the calling thread the name that ps, gdb and the kernel show (15 characters at most).
void NameThisThread(const std::string& name);

// Runs `body` on a thread called `name`. All signals are blocked there: they belong to Python's
// main thread. The owner ends the thread by its own means and then joins; the destructor joins
// without a bound, so an owner that needs a bound calls JoinFor first.
class Thread {
 public:
  Thread() = default;
  Thread(std::string name, std::function<void()> body);
  Thread(Thread&&) = default;
  Thread& operator=(Thread&&) = default;
  ~Thread() { Join(); }

  bool joinable() const { return thread_.joinable(); }
  bool IsThisThread() const { return thread_.get_id() == std::this_thread::get_id(); }
  // Waits until the body has returned.
  void Join();
  // Waits for the body at most this long. False: it still runs, and the thread was detached, so
  // everything the body uses must be kept alive by the body itself.
  bool JoinFor(Duration bound);

 private:
  struct Ended;
  std::shared_ptr<Ended> ended_;
  std::thread thread_;
};

}  // namespace hetccl

#endif  // XLA_FFI_COMMON_THREAD_H_
