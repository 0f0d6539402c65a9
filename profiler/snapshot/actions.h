#pragma once

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "profiler/event.h"

namespace oomdiag {

/// What a snapshot calls the events of its history. Of two words for one kind the first is written.
inline constexpr std::array<std::pair<std::string_view, EventKind>, 9> kActions = {
    {{"alloc", EventKind::alloc},
     {"free_requested", EventKind::free_requested},
     {"free_completed", EventKind::free_completed},
     {"free", EventKind::free_completed},
     {"segment_alloc", EventKind::segment_alloc},
     {"segment_free", EventKind::segment_free},
     {"segment_map", EventKind::segment_map},
     {"segment_unmap", EventKind::segment_unmap},
     {"oom", EventKind::out_of_memory}}};

/// Of an unknown word: EventKind::none.
inline EventKind kind_of_action(std::string_view action) {
  const auto found = std::ranges::find(kActions, action, [](const auto& one) { return one.first; });
  return found == kActions.end() ? EventKind::none : found->second;
}

/// Empty for events that a snapshot does not have.
inline std::string_view action_of(EventKind kind) {
  const auto found = std::ranges::find(kActions, kind, [](const auto& one) { return one.second; });
  return found == kActions.end() ? std::string_view() : found->first;
}

}  // namespace oomdiag
