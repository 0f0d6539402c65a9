#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "profiler/snapshot/pickle.h"

namespace oomdiag {

/// The keys of a snapshot's dictionaries that are of use; `none` is any other.
enum class SnapshotField : uint8_t {
  none,
  name,
  filename,
  line,
  action,
  addr,
  device_free,
  address,
  size,
  stream,
  time_us,
  frames,
  history,
  state,
  requested_size,
  real_size,
  total_size,
  segment_type,
  is_expandable,
  device,
  blocks,
  user_metadata,
  fx_original_trace,
  count
};

/// In the order of their values, from 1.
inline constexpr std::array<std::string_view, static_cast<size_t>(SnapshotField::count) - 1> kFieldNames = {
    "name",    "filename",       "line",          "action",           "addr",         "device_free",
    "address", "size",           "stream",        "time_us",          "frames",       "history",
    "state",   "requested_size", "real_size",     "total_size",       "segment_type", "is_expandable",
    "device",  "blocks",         "user_metadata", "fx_original_trace"};

inline SnapshotField field_of(std::string_view key) {
  const auto found = std::ranges::find(kFieldNames, key);
  return found == kFieldNames.end() ? SnapshotField::none : static_cast<SnapshotField>(found - kFieldNames.begin() + 1);
}

/// The items of one dictionary, by field. Filled again and again, so that each costs no more than the items it has.
class Fields {
 public:
  void read(const Pickle& pickle, Pickle::Items items) {
    seen_ = 0;
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      const auto field = static_cast<size_t>(find(pickle, items[i]));
      values_[field] = items[i + 1];
      seen_ |= uint32_t{1} << field;
    }
  }
  bool has(SnapshotField field) const { return (seen_ >> static_cast<size_t>(field) & 1) != 0; }
  PickleValue operator[](SnapshotField field) const {
    return has(field) ? values_[static_cast<size_t>(field)] : PickleValue();
  }
  int64_t number(SnapshotField field) const {
    return (*this)[field].is(PickleValue::Kind::integer) ? (*this)[field].number() : 0;
  }
  uint64_t address(SnapshotField field) const { return static_cast<uint64_t>(std::max<int64_t>(0, number(field))); }

 private:
  /// Keys are texts that are kept once each: their field is looked up the first time only.
  SnapshotField find(const Pickle& pickle, PickleValue key) {
    if (!key.is(PickleValue::Kind::text)) return SnapshotField::none;
    if (key.index() >= known_.size()) [[unlikely]]
      known_.resize(key.index() + 1, SnapshotField::count);
    SnapshotField& field = known_[key.index()];
    if (field == SnapshotField::count) [[unlikely]]
      field = field_of(pickle.text(key));
    return field;
  }

  static_assert(static_cast<size_t>(SnapshotField::count) <= 32);
  std::array<PickleValue, static_cast<size_t>(SnapshotField::count)> values_{};
  uint32_t seen_ = 0;                   ///< a bit for each field
  std::vector<SnapshotField> known_{};  ///< by text
};

}  // namespace oomdiag
