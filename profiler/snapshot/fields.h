#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "profiler/snapshot/pickle.h"

namespace oomdiag {

/// The keys of a snapshot's dictionaries that are of use; `none` is any other.
enum class Field : uint8_t {
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

inline constexpr std::array<std::pair<std::string_view, Field>, 22> kFields = {
    {{"name", Field::name},
     {"filename", Field::filename},
     {"line", Field::line},
     {"action", Field::action},
     {"addr", Field::addr},
     {"device_free", Field::device_free},
     {"address", Field::address},
     {"size", Field::size},
     {"stream", Field::stream},
     {"time_us", Field::time_us},
     {"frames", Field::frames},
     {"history", Field::history},
     {"state", Field::state},
     {"requested_size", Field::requested_size},
     {"real_size", Field::real_size},
     {"total_size", Field::total_size},
     {"segment_type", Field::segment_type},
     {"is_expandable", Field::is_expandable},
     {"device", Field::device},
     {"blocks", Field::blocks},
     {"user_metadata", Field::user_metadata},
     {"fx_original_trace", Field::fx_original_trace}}};

inline Field field_of(std::string_view key) {
  const auto found = std::find_if(kFields.begin(), kFields.end(), [&](const auto& one) { return one.first == key; });
  return found == kFields.end() ? Field::none : found->second;
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
  bool has(Field field) const { return (seen_ >> static_cast<size_t>(field) & 1) != 0; }
  PickleValue operator[](Field field) const { return has(field) ? values_[static_cast<size_t>(field)] : PickleValue(); }
  int64_t number(Field field) const {
    return (*this)[field].is(PickleValue::Kind::integer) ? (*this)[field].number() : 0;
  }
  uint64_t address(Field field) const { return static_cast<uint64_t>(std::max<int64_t>(0, number(field))); }

 private:
  /// Keys are texts that are kept once each: their field is looked up the first time only.
  Field find(const Pickle& pickle, PickleValue key) {
    if (!key.is(PickleValue::Kind::text)) return Field::none;
    if (key.index() >= known_.size()) [[unlikely]]
      known_.resize(key.index() + 1, Field::count);
    Field& field = known_[key.index()];
    if (field == Field::count) [[unlikely]]
      field = field_of(pickle.text(key));
    return field;
  }

  static_assert(static_cast<size_t>(Field::count) <= 32);
  std::array<PickleValue, static_cast<size_t>(Field::count)> values_{};
  uint32_t seen_ = 0;           ///< a bit for each field
  std::vector<Field> known_{};  ///< by text
};

}  // namespace oomdiag
