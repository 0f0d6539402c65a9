#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "extension/environment.h"

namespace oomdiag {

/// The line that says that a process asked for CUDA and has the recorder.
inline constexpr char kRecorderLoaded[] = "recorder loaded";

/// Adds a line to a file in the run folder for the launcher: why this process is not recorded, or nothing, which says that
/// the shim was loaded. Several processes may do so: the first line is the first reason. False if there is no such folder.
inline bool write_status(const std::string& text) {
  const char* folder = variables::text(variables::kOutput);
  if (*folder == '\0') return false;
  const int file =
      open((std::string(folder) + "/loaded").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (file < 0) return false;
  const std::string line = text.empty() ? text : text + '\n';
  const bool written = write(file, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  close(file);
  return written;
}

/// Writes `reason` to the status file, or to stderr where there is no folder.
inline void report_not_recording(const std::string& reason) {
  if (!write_status(reason)) std::fprintf(stderr, "oomdiag: warning: not recording: %s\n", reason.c_str());
}

}  // namespace oomdiag
