#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "profiler/trace/event_file.h"

namespace oomdiag {

/// A value of a pickle in 8 bytes: a small number, or the index of what is kept elsewhere.
class PickleValue {
 public:
  enum class Kind : uint8_t { none, boolean, integer, real, text, list, tuple, dict, record };

  PickleValue() = default;
  /// `number` is cut to 60 bits: no address, size or time of a snapshot needs more.
  PickleValue(Kind kind, int64_t number)
      : bits_(static_cast<uint64_t>(kind) << 60 |
              (static_cast<uint64_t>(std::clamp(number, -kMost, kMost)) & kNumber)) {}

  Kind kind() const { return static_cast<Kind>(bits_ >> 60); }
  bool is(Kind kind) const { return this->kind() == kind; }
  int64_t number() const { return static_cast<int64_t>(bits_ << 4) >> 4; }
  size_t index() const { return static_cast<size_t>(number()); }

 private:
  static constexpr int64_t kMost = (int64_t{1} << 59) - 1;
  static constexpr uint64_t kNumber = ~uint64_t{0} >> 4;

  uint64_t bits_ = 0;
};

/// A pickle of plain data (protocols 2 to 5), read in one pass. No code in it is ever run: an opcode that would is refused.
///
/// Dictionaries are given to `fold` when their items are complete; what it returns takes the dictionary's place as a
/// record, so that millions of small dictionaries cost what the caller keeps of them. A pickle of which more would have to
/// be kept than four times its file, as one made to take all memory, is refused on the way.
class Pickle {
 public:
  using Kind = PickleValue::Kind;
  /// Items of a dictionary: key, value, key, value, …
  using Items = std::span<const PickleValue>;
  using Fold = std::function<std::optional<int64_t>(Pickle&, Items)>;

  explicit Pickle(Fold fold) : fold_(std::move(fold)) {}

  /// Reads `file` and gives its value. Throws Error(input), naming `name`, for anything but a pickle of plain data.
  PickleValue read(const InputFile& file, const std::string& name);

  std::string_view text(PickleValue value) const;
  /// The elements of a list or tuple, none of anything else.
  std::span<const PickleValue> elements(PickleValue value) const;
  /// The items of a dictionary that was not folded; none of anything else.
  Items items(PickleValue value) const { return elements(resolve(value)); }
  /// What a list or dictionary was turned into, else the value itself.
  PickleValue resolve(PickleValue value) const {
    if (value.is(Kind::dict)) return dicts_[value.index()];
    if (!value.is(Kind::list)) return value;
    const PickleValue record = list_records_[value.index()];
    return record.is(Kind::none) ? value : record;
  }
  /// Lets a record stand for a list, and forgets its elements.
  void replace_list(PickleValue list, int64_t record);
  /// The value of `key` among the items of a dictionary; none if it has none.
  PickleValue find(PickleValue dict, std::string_view key) const;

 private:
  friend class PickleMachine;

  PickleValue add_text(std::string_view text);
  PickleValue add_list(Kind kind, std::vector<PickleValue> elements);
  PickleValue add_dict() {
    dicts_.emplace_back();
    return {Kind::dict, static_cast<int64_t>(dicts_.size() - 1)};
  }
  bool set_items(PickleValue dict, Items items);
  /// About what is kept, and what the caller keeps of records; at least what a dictionary or list takes when it is empty.
  uint64_t kept_bytes() const;

  Fold fold_;
  std::deque<std::string> texts_;
  std::unordered_map<std::string_view, size_t> text_index_;
  std::vector<std::vector<PickleValue>> lists_;
  std::vector<PickleValue> list_records_;  ///< by list: the record in its place, or none
  std::vector<PickleValue> dicts_;         ///< a record, or the list of its items
  uint64_t elements_ = 0;                  ///< of all lists, ever
  uint64_t records_ = 0;
  uint64_t text_bytes_ = 0;
};

}  // namespace oomdiag
