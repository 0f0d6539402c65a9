#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace oomdiag {

/// The file's name, beside the trace.
inline constexpr char kWorkFile[] = "work";

/// Watches the shapes of every operator that works on a GPU from here to the end of the process. That takes time, so only a run that is
/// made for it does so (OOMDIAG_METER). Writes `file` at exit: a line for each operator, module and set of shapes in a phase of a step,
/// for the newest steps, and one that says how many steps were over:
///
///   step TAB phase TAB module TAB operator TAB calls TAB inputs '>' outputs
///
/// where `module` is the id of a name in the trace, and values lie apart by blanks: a tensor "Float:4:8x3x14x14" (dtype, bytes of an
/// element, shape; "@host" after it where it is not on a GPU, "~" where elements that are neighbours in its last dimension lie apart in
/// memory), a list of tensors "list:dtype:count:bytes:elements of those with two dimensions and more", a number or bool "i:5", bools
/// "m:110", anything else "-". A collective is the operator "nccl::all_reduce", as ProcessGroupNCCL calls it, whose inputs are its tensors,
/// the ranks of its group, the distance between two of them (-1: that of the whole job), and whether the next operator waits for it. A kernel
/// that no operator launches is "kernel::triton_poi_fused_add_0", with the bytes that it reads and writes as two tensors, and whether that is
/// all that it does. In a job the second line has the ranks of a host, and the links that the command line names:
///
///   job TAB 8 nvlink,rdma
///
/// Call it once, while recording.
void start_work_meter(const std::filesystem::path& file);

/// Meters kernels that no operator of PyTorch launches, as those of torch.compile, Triton and CuPy, on the virtual device: by what their PTX
/// says that they read and write of each tensor. Call it with start_work_meter, before the program compiles any.
void start_launch_meter();

/// Counts a kernel that this thread launches, outside of operators that are metered (start_launch_meter): their kernels belong to them.
void meter_kernel(std::string_view name, int64_t read_bytes, int64_t written_bytes, bool is_known);

}  // namespace oomdiag
