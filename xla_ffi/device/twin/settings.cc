#include "xla_ffi/device/twin/settings.h"

#include <cctype>
#include <cstdlib>
#include <sstream>
#include <utility>

namespace hetccl::twin {

Settings::Settings(std::map<std::string, int64_t> numbers) : numbers_(std::move(numbers)) {
  for (auto& [name, value] : numbers_) {
    std::string variable = "TWIN_" + name;
    for (char& c : variable) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    if (const char* text = std::getenv(variable.c_str())) value = std::atoll(text);
  }
  ReadList("TWIN_FAIL", &Settings::Fail);
  ReadList("TWIN_FAIL_WHEN_RUN", &Settings::FailWhenRun);
  if (const char* text = std::getenv("TWIN_DELAY")) {
    std::istringstream list(text);
    for (std::string item; std::getline(list, item, ',');) {
      const size_t colon = item.find(':');
      if (colon != std::string::npos) {
        Delay(item.substr(0, colon), std::atoll(item.c_str() + colon + 1));
      }
    }
  }
}

// "call:nth:code,call:nth:code"
void Settings::ReadList(const char* variable,
                        void (Settings::*set)(const std::string&, int64_t, int)) {
  const char* text = std::getenv(variable);
  std::istringstream list(text == nullptr ? "" : text);
  for (std::string item; std::getline(list, item, ',');) {
    std::istringstream fields(item);
    std::string call, nth, code;
    if (std::getline(fields, call, ':') && std::getline(fields, nth, ':') &&
        std::getline(fields, code)) {
      (this->*set)(call, std::atoll(nth.c_str()), std::atoi(code.c_str()));
    }
  }
}

int64_t Settings::Number(const std::string& name) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return numbers_.at(name);
}

bool Settings::SetNumber(const std::string& name, int64_t value) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = numbers_.find(name);
  if (found == numbers_.end()) return false;
  found->second = value;
  return true;
}

std::optional<int> Settings::Attribute(int attribute) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = attributes_.find(attribute);
  return found == attributes_.end() ? std::nullopt : std::optional<int>(found->second);
}

void Settings::SetAttribute(int attribute, int value) {
  std::lock_guard<std::mutex> lock(mutex_);
  attributes_[attribute] = value;
}

int Settings::Pass(std::map<std::string, Failure>* failures, const std::string& call) {
  const auto failure = failures->find(call);
  if (failure == failures->end() || --failure->second.nth > 0) return 0;
  const int code = failure->second.code;
  failures->erase(failure);
  return code;
}

int Settings::Enter(const std::string& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counts_[call];
  return Pass(&failures_, call);
}

int Settings::EnterRun(const std::string& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  return Pass(&run_failures_, call);
}

int64_t Settings::Count(const std::string& call) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = counts_.find(call);
  return found == counts_.end() ? 0 : found->second;
}

void Settings::Fail(const std::string& call, int64_t nth, int code) {
  std::lock_guard<std::mutex> lock(mutex_);
  failures_[call] = Failure{nth, code};
}

void Settings::FailWhenRun(const std::string& call, int64_t nth, int code) {
  std::lock_guard<std::mutex> lock(mutex_);
  run_failures_[call] = Failure{nth, code};
}

void Settings::Delay(const std::string& call, int64_t microseconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  delays_[call] = microseconds;
}

std::chrono::microseconds Settings::DelayOf(const std::string& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = delays_.find(call);
  int64_t delay = found == delays_.end() ? 0 : found->second;
  if (const int64_t jitter = numbers_.at("jitter_us"); jitter > 0) {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    delay += static_cast<int64_t>((random_ >> 33) % static_cast<uint64_t>(jitter + 1));
  }
  return std::chrono::microseconds(delay);
}

void Settings::ClearCounts() {
  std::lock_guard<std::mutex> lock(mutex_);
  counts_.clear();
}

void Settings::ClearFaults() {
  std::lock_guard<std::mutex> lock(mutex_);
  failures_.clear();
  run_failures_.clear();
  delays_.clear();
  numbers_.at("jitter_us") = 0;
  numbers_.at("memory_waits") = 0;
}

}  // namespace hetccl::twin
