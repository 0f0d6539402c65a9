#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace oomdiag {

/// Thrown where somebody interrupted what went on, by this signal.
struct Interrupted {
  int signal = 0;
};

/// Called with the index of a work that is over, and what it returned; nullopt if its process died.
using TakeAnswer = std::function<void(std::size_t, std::optional<std::string>)>;

/// Runs each of `works` in a process of its own, at most `at_once` at a time, and gives each answer to `take` when it is there.
/// They have no stdin. A signal that ends us ends all of them, with whatever they started, at once: then throws Interrupted.
/// Not for programs that have threads.
void run_each_in_a_process(const std::vector<std::function<std::string()>>& works, int at_once, const TakeAnswer& take);

/// The same; gives all answers, in the order of the works. `on_done` is called with the number that are over.
std::vector<std::optional<std::string>> run_in_processes(const std::vector<std::function<std::string()>>& works,
                                                         int at_once, const std::function<void(std::size_t)>& on_done);

/// How many programs may run beside each other here: one per core, as far as memory goes, where the largest takes
/// `bytes_of_one`; 0 = nobody knows.
int programs_at_once(int64_t bytes_of_one);

/// Runs `work` in a process of its own, which takes no more memory than the host has left, and gives what it returned; nullopt
/// if that process died. Throws likewise.
std::optional<std::string> run_apart(const std::function<std::string()>& work);

}  // namespace oomdiag
