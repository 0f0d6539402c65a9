#pragma once

#include <functional>
#include <string>
#include <vector>

// A Python program starts in seconds, most of which go into its imports. A process that has made them forks the program for
// us (extension/python/fixes/oomdiag_forks.py), so that each of many runs begins where its own code does:
//
//   oomdiag ─ fork ─ stands for the program: ─── socket ─── keeper ── fork ── the program
//                    signals →                              passes them on
//                    ends as it ended       ← wait status ─ waits for it
namespace oomdiag {

/// The socket of a process that shall fork programs, listening; -1 where there can be none.
int listen_for_programs(const std::string& socket);

/// In a child that would exec: asks the process behind `socket` for a fork that becomes this program with our environment and
/// standard streams, passes our signals on to it, and ends as it ends. If we are killed it is, too. Returns, having done
/// nothing, where that process is gone or declines. `on_start` is called once the program runs.
void become_by_fork(const std::string& socket, const std::vector<std::string>& arguments,
                    const std::function<void()>& on_start);

}  // namespace oomdiag
