#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "profiler/snapshot/timeline.h"

namespace oomdiag {

/// Of numbers that are no bytes 0.
inline int64_t whole(double bytes) {
  constexpr double kLargest = 9e18;
  return std::isfinite(bytes) ? static_cast<int64_t>(std::clamp(bytes, -kLargest, kLargest)) : 0;
}

/// Takes a total at some time. False where it is no new peak.
inline bool note(TimelineOfGpu& gpu, double time_us, int64_t bytes) {
  if (gpu.changes++ == 0) gpu.begin_us = gpu.end_us = gpu.peak_us = time_us;
  gpu.begin_us = std::min(gpu.begin_us, time_us);
  if (time_us >= gpu.end_us) {
    gpu.end_us = time_us;
    gpu.end_bytes = bytes;
  }
  if (bytes <= gpu.peak_bytes) return false;
  gpu.peak_bytes = bytes;
  gpu.peak_us = time_us;
  return true;
}

inline constexpr const char* kDamagedTimeline = " that is damaged or cut off";

/// Sees the values of a file go by; those who derive from it look at some. Empty `what_is_wrong`: nothing is.
class TimelineReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool number_integer(number_integer_t value) override { return number(static_cast<double>(value)); }
  bool number_unsigned(number_unsigned_t value) override { return number(static_cast<double>(value)); }
  bool number_float(number_float_t value, const string_t&) override { return number(value); }
  bool string(string_t&) override { return true; }
  bool key(string_t&) override { return true; }
  bool start_object(size_t) override { return true; }
  bool end_object() override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return reject(kDamagedTimeline);
  }

  virtual const char* format() const = 0;
  virtual const char* hint() const = 0;
  /// What was read; called once, at the end.
  virtual MemoryTimeline finish() = 0;
  const std::string& what_is_wrong() const { return wrong_; }

 protected:
  virtual bool number(double value) = 0;
  bool reject(std::string wrong) {
    if (wrong_.empty()) wrong_ = std::move(wrong);
    return false;
  }

 private:
  std::string wrong_;
};

/// Of lists: both kinds that there are.
std::unique_ptr<TimelineReader> make_list_reader();

}  // namespace oomdiag
