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
  /// Something that is kept elsewhere.
  static PickleValue at(Kind kind, uint64_t index) {
    PickleValue value;
    value.bits_ = static_cast<uint64_t>(kind) << 60 | index;
    return value;
  }
  /// `number` is cut to 60 bits: no address, size or time of a snapshot needs more.
  PickleValue(Kind kind, int64_t number)
      : bits_(static_cast<uint64_t>(kind) << 60 | (static_cast<uint64_t>(std::clamp(number, -kMax, kMax)) & kNumber)) {}

  Kind kind() const { return static_cast<Kind>(bits_ >> 60); }
  bool is(Kind kind) const { return this->kind() == kind; }
  int64_t number() const { return static_cast<int64_t>(bits_ << 4) >> 4; }
  size_t index() const { return static_cast<size_t>(number()); }
  uint64_t bits() const { return bits_; }

  bool operator==(const PickleValue&) const = default;

 private:
  static constexpr int64_t kMax = (int64_t{1} << 59) - 1;
  static constexpr uint64_t kNumber = ~uint64_t{0} >> 4;

  uint64_t bits_ = 0;
};

/// A pickle of plain data (protocols 2 to 5), read in one pass. No code in it is ever run: an opcode that would is
/// rejected.
///
/// Dictionaries are given to `fold` when their items are complete; what it returns takes the dictionary's place as a
/// record. Elements of a list are given to `absorb`, which may keep them elsewhere: then a record stands for the list. So
/// millions of small dictionaries cost what the caller keeps of them, and four bytes in the memo. A pickle of which more would
/// have to be kept than four times its file, as one made to take all memory, is rejected on the way.
class Pickle {
 public:
  using Kind = PickleValue::Kind;
  /// Items of a dictionary: key, value, key, value, …
  using Items = std::span<const PickleValue>;
  using Fold = std::function<std::optional<int64_t>(Pickle&, Items)>;
  /// Given the first elements of a list, or more of one that stands as this record.
  using Absorb = std::function<std::optional<int64_t>(Pickle&, Items, std::optional<int64_t>)>;

  Pickle(Fold fold, Absorb absorb) : fold_(std::move(fold)), absorb_(std::move(absorb)) { tuples_.emplace_back(); }

  /// Reads `file` and gives its value. Throws Error(input), naming `name`, for anything but a pickle of plain data.
  PickleValue read(const InputFile& file, const std::string& name);

  std::string_view text(PickleValue value) const;
  /// The elements of a list or tuple, none of anything else.
  std::span<const PickleValue> elements(PickleValue value) const;
  /// The items of a dictionary that was not folded; none of anything else.
  Items items(PickleValue value) const;
  /// What a list or dictionary was turned into, else the value itself.
  PickleValue resolve(PickleValue value) const {
    if (!value.is(Kind::dict) && !value.is(Kind::list)) return value;
    const PickleValue record = containers_[value.index()].content;
    return record.is(Kind::record) ? record : value;
  }
  /// Lets a record stand for a list that `fold` was given in an item, and forgets its elements. `fold` must then return a
  /// record.
  void replace_list(PickleValue list, int64_t record);
  /// The value of `key` among the items of a dictionary; none if it has none.
  PickleValue find(PickleValue dict, std::string_view key) const;

 private:
  friend class PickleMachine;

  /// A list or dictionary that no record has replaced, or one that has, but to which several references lead.
  struct Container {
    PickleValue content;          ///< none = empty; list: index of its elements or items; record
    uint32_t memo_place = kNone;  ///< where the memo has it
    bool is_pinned = false;       ///< there are references besides that one and the one on the stack
  };
  static constexpr uint32_t kNone = ~uint32_t{0};
  static constexpr uint32_t kMemoKind = 28, kMemoNumber = (uint32_t{1} << kMemoKind) - 1, kLargeMemo = 15;

  PickleValue add_text(std::string_view text);
  PickleValue add_tuple(Items elements);
  PickleValue add_container(Kind kind) {
    if (unused_containers_.empty()) {
      containers_.emplace_back();
      return PickleValue::at(kind, containers_.size() - 1);
    }
    const uint32_t index = unused_containers_.back();
    unused_containers_.pop_back();
    containers_[index] = {};
    return PickleValue::at(kind, index);
  }
  size_t add_elements(Items elements);
  void drop_elements(size_t index);
  PickleValue replace(PickleValue container, PickleValue record);
  static bool is_container(PickleValue value) { return value.is(Kind::dict) || value.is(Kind::list); }
  void remember(PickleValue value, uint64_t place) {
    if (is_container(value)) {
      Container& one = containers_[value.index()];
      if (one.memo_place != kNone) one.is_pinned = true;
      one.memo_place = static_cast<uint32_t>(place);
    }
    if (place > memo_.size()) memo_.resize(place);
    if (place == memo_.size()) return memo_.push_back(memo_entry(value));
    memo_[place] = memo_entry(value);
  }
  PickleValue recall(uint64_t place) {
    const PickleValue value = memo_value(place);
    if (is_container(value)) containers_[value.index()].is_pinned = true;
    return value;
  }
  uint32_t memo_entry(PickleValue value) {
    if (const uint64_t number = value.bits() & ~(uint64_t{15} << 60); number <= kMemoNumber) {
      return static_cast<uint32_t>(value.kind()) << kMemoKind | static_cast<uint32_t>(number);
    }
    large_memo_.push_back(value);
    return kLargeMemo << kMemoKind | static_cast<uint32_t>(large_memo_.size() - 1);
  }
  PickleValue memo_value(uint64_t place) const {
    const uint32_t entry = memo_[place], kind = entry >> kMemoKind, number = entry & kMemoNumber;
    return kind == kLargeMemo ? large_memo_[number] : PickleValue::at(static_cast<Kind>(kind), number);
  }
  bool append(PickleValue list, Items elements);
  std::optional<PickleValue> set_items(PickleValue dict, Items items);
  /// About what is kept, and what the caller keeps of records.
  uint64_t kept_bytes() const;

  Fold fold_;
  Absorb absorb_;
  std::deque<std::string> texts_;
  std::unordered_map<std::string_view, size_t> text_index_;
  std::vector<Container> containers_;
  std::vector<uint32_t> unused_containers_;
  std::vector<std::vector<PickleValue>> lists_;  ///< what containers hold
  std::vector<uint32_t> unused_lists_;
  std::deque<std::vector<PickleValue>> tuples_;  ///< the first is empty; equal ones of plain values are one
  std::unordered_multimap<uint64_t, size_t> tuple_index_;
  std::vector<uint32_t> memo_;  ///< values that fit into 28 bits, else where they lie in `large_memo_`
  std::vector<PickleValue> large_memo_;
  uint64_t elements_ = 0;  ///< of lists and tuples
  uint64_t records_ = 0;
  uint64_t text_bytes_ = 0;
};

}  // namespace oomdiag
