#pragma once

// Words of a meter's file that the recorder writes (extension/record/work_meter.h) and the profiler reads (profiler/cost).
namespace oomdiag {

/// Behind the name of a copy: on a stream of the program's own, so that it runs beside what the default stream computes.
inline constexpr char kOnOwnStream[] = "@stream";

/// Before the name of a kernel that no operator launches.
inline constexpr char kKernelPrefix[] = "kernel::";

}  // namespace oomdiag
