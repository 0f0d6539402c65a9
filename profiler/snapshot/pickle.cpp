#include "profiler/snapshot/pickle.h"

#include <algorithm>

#include "profiler/trace/mix.h"

// Of a snapshot's ten million containers a handful are open at a time; the rest are records. A container that becomes one
// is known to two places only, the stack and one entry of the memo, unless the pickle asked the memo for it meanwhile.
// Both are overwritten by the record, and the container's slot is used again. So what grows with the file is the memo.

namespace oomdiag {
std::string_view Pickle::text(PickleValue value) const {
  return value.is(Kind::text) ? std::string_view(texts_[value.index()]) : std::string_view();
}

std::span<const PickleValue> Pickle::elements(PickleValue value) const {
  if (value.is(Kind::tuple)) return tuples_[value.index()];
  if (!value.is(Kind::list)) return {};
  const PickleValue content = containers_[value.index()].content;
  return content.is(Kind::list) ? std::span<const PickleValue>(lists_[content.index()]) : Items();
}

Pickle::Items Pickle::items(PickleValue value) const {
  if (!value.is(Kind::dict)) return {};
  const PickleValue content = containers_[value.index()].content;
  return content.is(Kind::list) ? Items(lists_[content.index()]) : Items();
}

void Pickle::replace_list(PickleValue list, int64_t record) { replace(list, PickleValue(Kind::record, record)); }

PickleValue Pickle::find(PickleValue dict, std::string_view key) const {
  const Items all = items(dict);
  for (size_t i = 0; i + 1 < all.size(); i += 2) {
    if (text(all[i]) == key) return all[i + 1];
  }
  return {};
}

PickleValue Pickle::add_text(std::string_view text) {
  const auto known = text_index_.find(text);
  if (known != text_index_.end()) return {Kind::text, static_cast<int64_t>(known->second)};
  texts_.emplace_back(text);
  text_bytes_ += text.size();
  text_index_.emplace(texts_.back(), texts_.size() - 1);
  return {Kind::text, static_cast<int64_t>(texts_.size() - 1)};
}

// Every entry of a history may name its pool by such a pair.
PickleValue Pickle::add_tuple(Items elements) {
  if (elements.empty()) return {Kind::tuple, 0};
  uint64_t hash = elements.size();
  bool plain = true;
  for (const PickleValue value : elements) {
    hash = mix(hash, value.bits());
    plain = plain && !is_container(value);
  }
  const auto [begin, end] = tuple_index_.equal_range(hash);
  for (auto at = begin; plain && at != end; ++at) {
    if (std::ranges::equal(tuples_[at->second], elements)) return {Kind::tuple, static_cast<int64_t>(at->second)};
  }
  for (const PickleValue value : elements) {
    if (is_container(value)) containers_[value.index()].is_pinned = true;
  }
  elements_ += elements.size();
  tuples_.emplace_back(elements.begin(), elements.end());
  if (plain) tuple_index_.emplace(hash, tuples_.size() - 1);
  return {Kind::tuple, static_cast<int64_t>(tuples_.size() - 1)};
}

size_t Pickle::add_elements(Items elements) {
  elements_ += elements.size();
  if (unused_lists_.empty()) {
    lists_.emplace_back(elements.begin(), elements.end());
    return lists_.size() - 1;
  }
  const uint32_t index = unused_lists_.back();
  unused_lists_.pop_back();
  lists_[index].assign(elements.begin(), elements.end());
  return index;
}

void Pickle::drop_elements(size_t index) {
  constexpr size_t kWorthKeeping = 1024;
  elements_ -= lists_[index].size();
  if (lists_[index].capacity() > kWorthKeeping) lists_[index] = {};
  lists_[index].clear();
  unused_lists_.push_back(static_cast<uint32_t>(index));
}

/// What shall stand where the container stood.
PickleValue Pickle::replace(PickleValue container, PickleValue record) {
  Container& one = containers_[container.index()];
  if (one.content.is(Kind::list)) drop_elements(one.content.index());
  one.content = record;
  if (one.is_pinned) return container;
  if (one.memo_place != kNone && memo_value(one.memo_place) == container) memo_[one.memo_place] = memo_entry(record);
  unused_containers_.push_back(static_cast<uint32_t>(container.index()));
  return record;
}

// False for more elements of a list that stands as a record of something else.
bool Pickle::append(PickleValue list, Items elements) {
  if (elements.empty()) return true;
  const PickleValue content = containers_[list.index()].content;
  if (content.is(Kind::list)) {
    auto& all = lists_[content.index()];
    elements_ += elements.size();
    all.insert(all.end(), elements.begin(), elements.end());
    return true;
  }
  std::optional<int64_t> record;
  if (content.is(Kind::record)) record = content.number();
  const auto absorbed = absorb_(*this, elements, record);
  if (!absorbed && record) return false;
  containers_[list.index()].content = absorbed ? PickleValue(Kind::record, *absorbed)
                                               : PickleValue(Kind::list, static_cast<int64_t>(add_elements(elements)));
  return true;
}

// What shall stand for the dictionary; nothing if it is a record already: writers give the items of a small one at once.
std::optional<PickleValue> Pickle::set_items(PickleValue dict, Items items) {
  const PickleValue content = containers_[dict.index()].content;
  if (content.is(Kind::record)) return std::nullopt;
  if (content.is(Kind::list)) {
    auto& all = lists_[content.index()];
    elements_ += items.size();
    all.insert(all.end(), items.begin(), items.end());
    return dict;
  }
  if (const auto record = fold_(*this, items)) {
    ++records_;
    return replace(dict, PickleValue(Kind::record, *record));
  }
  containers_[dict.index()].content = PickleValue(Kind::list, static_cast<int64_t>(add_elements(items)));
  return dict;
}

uint64_t Pickle::kept_bytes() const {
  constexpr uint64_t kBytesOfText = 96, kBytesOfRecord = 64;  // a string and its entry in the index; the largest record
  constexpr uint64_t kBytesOfTuple = 64;                      // likewise of an index
  return text_bytes_ + texts_.size() * kBytesOfText + elements_ * sizeof(PickleValue) +
         lists_.size() * sizeof(decltype(lists_)::value_type) + tuples_.size() * kBytesOfTuple +
         containers_.size() * sizeof(Container) + records_ * kBytesOfRecord +
         memo_.size() * sizeof(decltype(memo_)::value_type) + large_memo_.size() * sizeof(PickleValue);
}

}  // namespace oomdiag
