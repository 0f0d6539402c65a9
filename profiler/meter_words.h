#pragma once

// Words of a meter's file that the recorder writes (extension/record/work_meter.h) and the profiler reads (profiler/cost).
namespace oomdiag {

/// Behind the name of a copy: on a stream of the program's own, so that it runs beside what the default stream computes.
inline constexpr char kOnOwnStream[] = "@stream";

/// In place of a name: operators that make views of tensors on a GPU. No kernel runs, and the host takes its time.
inline constexpr char kViews[] = "views";

/// Before the name of a kernel that no operator launches.
inline constexpr char kKernelPrefix[] = "kernel::";

}  // namespace oomdiag
