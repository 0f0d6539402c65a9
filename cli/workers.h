#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace oomdiag {

/// Thrown where somebody interrupted what went on, by this signal.
struct Interrupted {
  int signal = 0;
};

/// Runs each of `works` in a process of its own, at most `at_once` at a time, and gives what they returned, in their order;
/// nullopt for one that died. They have no stdin. `tell` is called with the number that are over, whenever one ends. A
/// signal that ends us ends all of them, with whatever they started, at once: then throws Interrupted. Not for programs
/// that have threads.
std::vector<std::optional<std::string>> run_in_processes(const std::vector<std::function<std::string()>>& works,
                                                         int at_once, const std::function<void(std::size_t)>& tell);

/// How many programs run beside each other here without being in each other's way: one per core, as far as memory
/// goes, where the largest that has run took `bytes_of_one`, 0 = nobody knows.
int programs_at_once(long bytes_of_one);

}  // namespace oomdiag
