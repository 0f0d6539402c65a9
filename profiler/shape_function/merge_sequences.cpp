#include "profiler/shape_function/merge_sequences.h"

#include <optional>
#include <set>
#include <span>
#include <utility>

#include "profiler/match.h"
#include "profiler/shape_function/allocation_sequence.h"
#include "profiler/shape_function/op_calls.h"
#include "profiler/trace/mix.h"

// What all runs do alike, the tensors that ops return and the ends of steps, cuts each sequence into gaps. In a gap there are only
// temporaries: what an op allocates and frees itself. Those are aligned gap by gap, and what only one of the two has goes in beside.
//
//   merged   a      w  b  free w  free a | step
//   other    a         b          free a | step      sizes of w: 64 in one run, 0 in the other
//   other    a  v      b  free v  free a | step      v and w are two temporaries if their places differ

namespace oomdiag {
namespace {

using ItemKind = AllocationSequence::ItemKind;

struct Token {
  uint64_t key = 0;     ///< equal where two runs did the same
  bool is_gap = false;  ///< of a temporary
  bool ends_step = false;
  AllocationSequence::Item item{};
};

/// Temporaries that are not to be taken for one of the other run.
using Apart = std::set<uint32_t>;

std::vector<Token> tokens_of(const AllocationSequence& sequence, const Apart& apart, uint64_t side) {
  std::vector<Token> tokens;
  size_t step = 0;
  for (size_t i = 0; i <= sequence.items.size(); ++i) {
    for (; step < sequence.step_ends.size() && sequence.step_ends[step] == i; ++step) {
      tokens.push_back({.key = ~uint64_t{0}, .ends_step = true});
    }
    if (i == sequence.items.size()) break;
    const auto& item = sequence.items[i];
    Token token{.key = static_cast<uint64_t>(item.kind), .item = item};
    if (item.kind != ItemKind::release_cached) {
      const auto& allocation = sequence.allocations[item.allocation];
      token.key = mix(mix(allocation.place, allocation.group), token.key);
      token.is_gap = allocation.is_temporary;
      if (apart.contains(item.allocation)) token.key = mix(mix(token.key, item.allocation), side);
    }
    tokens.push_back(token);
  }
  return tokens;
}

std::vector<uint64_t> keys_of(std::span<const Token> tokens) {
  std::vector<uint64_t> keys;
  for (const Token& token : tokens) keys.push_back(token.key);
  return keys;
}

bool has_same_core(const std::vector<Token>& left, const std::vector<Token>& right) {
  const auto core = [](const std::vector<Token>& tokens) {
    std::vector<uint64_t> keys;
    for (const Token& token : tokens) {
      if (!token.is_gap) keys.push_back(token.key);
    }
    return keys;
  };
  return core(left) == core(right);
}

class Merger {
 public:
  Merger(const MergedSequence& merged, const AllocationSequence& other, const Apart& left_apart,
         const Apart& right_apart)
      : left_(merged.sequence),
        right_(other),
        left_tokens_(tokens_of(left_, left_apart, kLeft)),
        right_tokens_(tokens_of(right_, right_apart, kRight)) {
    result_ = {.places = left_.places,
               .settings = left_.settings,
               .non_pytorch_bytes = left_.non_pytorch_bytes,
               .total_bytes = left_.total_bytes,
               .ended = left_.ended};
    from_left_.resize(left_.allocations.size(), kUnmatched);
    from_right_.resize(right_.allocations.size(), kUnmatched);
  }

  bool run() {
    if (!has_same_core(left_tokens_, right_tokens_)) return false;
    size_t l = 0, r = 0;
    while (is_consistent_) {
      const size_t l_end = end_of_gap(left_tokens_, l), r_end = end_of_gap(right_tokens_, r);
      merge_gap(std::span(left_tokens_).subspan(l, l_end - l), std::span(right_tokens_).subspan(r, r_end - r));
      if (l_end == left_tokens_.size()) break;
      take(&left_tokens_[l_end], &right_tokens_[r_end]);
      l = l_end + 1, r = r_end + 1;
    }
    return is_consistent_;
  }

  /// After run() was false: what to keep apart before it is tried again. False where that does not help.
  bool keep_apart(Apart& left_apart, Apart& right_apart) const {
    bool is_new = false;
    if (left_rejected_) is_new = left_apart.insert(*left_rejected_).second;
    if (right_rejected_) is_new = right_apart.insert(*right_rejected_).second || is_new;
    return is_new;
  }

  MergedSequence finish(const MergedSequence& before) {
    MergedSequence after{.sequence = std::move(result_)};
    const size_t count = after.sequence.allocations.size();
    for (const auto& sizes : before.sizes) {
      after.sizes.emplace_back(count, 0);
      for (size_t a = 0; a < from_left_.size(); ++a) after.sizes.back()[from_left_[a]] = sizes[a];
    }
    for (const auto& calls : before.calls) {
      after.calls.emplace_back(count, OpCalls::kNone);
      for (size_t a = 0; a < from_left_.size(); ++a) after.calls.back()[from_left_[a]] = calls[a];
    }
    after.op_calls = before.op_calls;
    after.op_calls.push_back(right_.calls);
    after.sizes.emplace_back(count, 0);
    after.calls.emplace_back(count, OpCalls::kNone);
    for (size_t a = 0; a < from_right_.size(); ++a) {
      if (from_right_[a] == kUnmatched) continue;
      after.sizes.back()[from_right_[a]] = right_.allocations[a].requested_bytes;
      after.calls.back()[from_right_[a]] = right_.calls.find(right_.allocations[a].call);
    }
    return after;
  }

 private:
  static size_t end_of_gap(const std::vector<Token>& tokens, size_t from) {
    while (from < tokens.size() && tokens[from].is_gap) ++from;
    return from;
  }

  void merge_gap(std::span<const Token> left, std::span<const Token> right) {
    const std::vector<uint32_t> partners = match(keys_of(left), keys_of(right));
    size_t r = 0;
    for (size_t l = 0; l < left.size(); ++l) {
      if (partners[l] == kUnmatched) {
        take(&left[l], nullptr);
        continue;
      }
      for (; r < partners[l]; ++r) take(nullptr, &right[r]);
      take(&left[l], &right[r++]);
    }
    for (; r < right.size(); ++r) take(nullptr, &right[r]);
  }

  /// Appends what the left one, the right one, or both do.
  void take(const Token* left, const Token* right) {
    const Token& token = left != nullptr ? *left : *right;
    if (token.ends_step) return result_.step_ends.push_back(result_.items.size());
    AllocationSequence::Item item = token.item;
    if (item.kind == ItemKind::alloc) {
      item.allocation = add_allocation(left, right);
    } else if (item.kind != ItemKind::release_cached) {
      item.allocation = left != nullptr ? from_left_[left->item.allocation] : from_right_[right->item.allocation];
      // A free belongs to who made the allocation: both, or the same one.
      const bool is_same = item.allocation < makers_.size() && makers_[item.allocation] == makers_of(left, right) &&
                           (right == nullptr || from_right_[right->item.allocation] == item.allocation);
      if (!is_same) return reject(left, right);
    }
    result_.items.push_back(item);
  }

  /// These two are not the frees of one allocation: next time their temporaries are kept apart.
  void reject(const Token* left, const Token* right) {
    is_consistent_ = false;
    if (left != nullptr && left->is_gap) left_rejected_ = left->item.allocation;
    if (right != nullptr && right->is_gap) right_rejected_ = right->item.allocation;
  }

  uint32_t add_allocation(const Token* left, const Token* right) {
    const auto index = static_cast<uint32_t>(result_.allocations.size());
    if (left != nullptr) {
      result_.allocations.push_back(left_.allocations[left->item.allocation]);
      from_left_[left->item.allocation] = index;
    } else {
      result_.allocations.push_back(right_.allocations[right->item.allocation]);
      result_.allocations.back().context = static_cast<uint32_t>(result_.places.size());
      result_.places.push_back(right_.places[right_.allocations[right->item.allocation].context]);
    }
    if (right != nullptr) from_right_[right->item.allocation] = index;
    makers_.push_back(makers_of(left, right));
    return index;
  }

  static uint8_t makers_of(const Token* left, const Token* right) {
    return static_cast<uint8_t>((left != nullptr ? kLeft : 0) | (right != nullptr ? kRight : 0));
  }

  static constexpr uint8_t kLeft = 1, kRight = 2;
  const AllocationSequence& left_;
  const AllocationSequence& right_;
  std::vector<Token> left_tokens_, right_tokens_;
  AllocationSequence result_;
  std::vector<uint32_t> from_left_, from_right_;  ///< the allocation of the result
  std::vector<uint8_t> makers_;                   ///< of each allocation of the result
  bool is_consistent_ = true;
  std::optional<uint32_t> left_rejected_, right_rejected_;  ///< temporaries that were taken for one and are not
};

}  // namespace

MergedSequence start_merge(AllocationSequence first) {
  MergedSequence merged{.sequence = std::move(first)};
  merged.op_calls.push_back(std::exchange(merged.sequence.calls, {}));
  merged.sizes.emplace_back();
  merged.calls.emplace_back();
  for (const auto& allocation : merged.sequence.allocations) {
    merged.sizes.back().push_back(allocation.requested_bytes);
    merged.calls.back().push_back(merged.op_calls.back().find(allocation.call));
  }
  return merged;
}

// An op's temporaries look alike, so that one may be taken for another that lives longer. Then these two are kept apart.
bool merge(MergedSequence& merged, const AllocationSequence& other) {
  constexpr int kMaxTries = 200;
  Apart left_apart, right_apart;
  for (int i = 0; i < kMaxTries; ++i) {
    Merger merger(merged, other, left_apart, right_apart);
    if (merger.run()) {
      merged = merger.finish(merged);
      return true;
    }
    if (!merger.keep_apart(left_apart, right_apart)) return false;
  }
  return false;
}

}  // namespace oomdiag
