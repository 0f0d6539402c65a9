#include "profiler/snapshot/pickle.h"

namespace oomdiag {

std::string_view Pickle::text(PickleValue value) const {
  return value.is(Kind::text) ? std::string_view(texts_[value.index()]) : std::string_view();
}

std::span<const PickleValue> Pickle::elements(PickleValue value) const {
  if (!value.is(Kind::list) && !value.is(Kind::tuple)) return {};
  return lists_[value.index()];
}

void Pickle::replace_list(PickleValue list, int64_t record) {
  lists_[list.index()] = {};
  list_records_[list.index()] = PickleValue(Kind::record, record);
}

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

PickleValue Pickle::add_list(Kind kind, std::vector<PickleValue> elements) {
  elements_ += elements.size();
  lists_.push_back(std::move(elements));
  list_records_.emplace_back();
  return {kind, static_cast<int64_t>(lists_.size() - 1)};
}

// False if the dictionary is a record already: writers give the items of a small one at once.
bool Pickle::set_items(PickleValue dict, Items items) {
  PickleValue& place = dicts_[dict.index()];
  if (place.is(Kind::record)) return false;
  if (place.is(Kind::list)) {
    auto& list = lists_[place.index()];
    elements_ += items.size();
    list.insert(list.end(), items.begin(), items.end());
    return true;
  }
  if (const auto record = fold_(*this, items)) {
    ++records_;
    dicts_[dict.index()] = PickleValue(Kind::record, *record);
  } else {
    dicts_[dict.index()] = add_list(Kind::list, {items.begin(), items.end()});
  }
  return true;
}

uint64_t Pickle::kept_bytes() const {
  constexpr uint64_t kBytesOfText = 96, kBytesOfRecord = 64;  // a string and its entry in the index; the largest record
  return text_bytes_ + texts_.size() * kBytesOfText + elements_ * sizeof(PickleValue) +
         lists_.size() * (sizeof(lists_[0]) + sizeof(PickleValue)) + dicts_.size() * sizeof(PickleValue) +
         records_ * kBytesOfRecord;
}

}  // namespace oomdiag
