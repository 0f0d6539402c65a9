#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

namespace oomdiag {

/// A list that does not change, so that copies share it: what is computed on copies of a step's allocations takes no copy of
/// what autograd says of each.
template <class T>
class SharedList {
 public:
  SharedList() = default;
  SharedList(std::vector<T> values)
      : values_(values.empty() ? nullptr : std::make_shared<const std::vector<T>>(std::move(values))) {}
  SharedList(std::initializer_list<T> values) : SharedList(std::vector<T>(values)) {}

  bool empty() const { return values_ == nullptr; }
  size_t size() const { return empty() ? 0 : values_->size(); }
  const T* begin() const { return empty() ? nullptr : values_->data(); }
  const T* end() const { return begin() + size(); }
  const T& front() const { return *begin(); }
  const T& operator[](size_t index) const { return begin()[index]; }
  bool operator==(const SharedList& other) const {
    return values_ == other.values_ || std::equal(begin(), end(), other.begin(), other.end());
  }

 private:
  std::shared_ptr<const std::vector<T>> values_;  ///< null: empty
};

}  // namespace oomdiag
