// What a test asks of the test twin: its devices, and the calls that are to fail or to take long.
#ifndef XLA_FFI_DEVICE_TWIN_SETTINGS_H_
#define XLA_FFI_DEVICE_TWIN_SETTINGS_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace hetccl::twin {

// Thread-safe. Read from the environment when the twin is first used, changed by the twin_*
// functions (control.h says what each means).
class Settings {
 public:
  // Defaults, then TWIN_DEVICES, TWIN_QUEUES and so on: the upper-case name of every number.
  explicit Settings(std::map<std::string, int64_t> numbers);

  int64_t Number(const std::string& name) const;
  // False: there is no such number.
  bool SetNumber(const std::string& name, int64_t value);

  std::optional<int> Attribute(int attribute) const;
  void SetAttribute(int attribute, int value);

  // Counts a call; the code that it is to fail with, 0 if it is to be carried out.
  int Enter(const std::string& call);
  int64_t Count(const std::string& call) const;
  void Fail(const std::string& call, int64_t nth, int code);
  void FailWhenRun(const std::string& call, int64_t nth, int code);
  void Delay(const std::string& call, int64_t microseconds);

  // What a queued operation is to wait before it runs, jitter included.
  std::chrono::microseconds DelayOf(const std::string& call);
  // The code that a queued operation is to break its device with, 0 if it is to run.
  int EnterRun(const std::string& call);

  void ClearCounts();
  void ClearFaults();

 private:
  struct Failure {
    int64_t nth = 0;  // of the calls to come, counted from 1
    int code = 0;
  };
  static int Pass(std::map<std::string, Failure>* failures, const std::string& call);
  void ReadList(const char* variable, void (Settings::*set)(const std::string&, int64_t, int));

  mutable std::mutex mutex_;  // guards all below
  std::map<std::string, int64_t> numbers_;
  std::map<int, int> attributes_;
  std::map<std::string, int64_t> counts_;
  std::map<std::string, Failure> failures_;
  std::map<std::string, Failure> run_failures_;
  std::map<std::string, int64_t> delays_;
  uint64_t random_ = 0x9E3779B97F4A7C15;
};

}  // namespace hetccl::twin

#endif  // XLA_FFI_DEVICE_TWIN_SETTINGS_H_
