#pragma once

#include <filesystem>

namespace oomdiag {

/// Writes the arguments of every outermost operator call from here to the end of the process to `file`, so that the call can be
/// called again alone, with other sizes (`oomdiag fit`, extension/python/fixes/oomdiag_calls.py). Only a run that is
/// made for it does so (OOMDIAG_ARGUMENTS). A line for each call, in the order of their ids:
///
///   call TAB {"op":["aten::sum","dim_IntList"],"mode":"g---fm-","in":[{"t":["Float",[64,768],[768,1],true,true,0,0]},[0],false,null]}
///
/// where `call` is that of the trace's events; "mode" has a letter for each setting that decides which kernel runs (current_mode()); a tensor is its
/// dtype, sizes, strides, whether it requires a gradient, whether it is on a GPU, the number of its storage among those of the
/// call, and its offset in there; {"f":"0x1p-1"} is a float, {"s":"mean"} a
/// string, {"d":"cuda:0"} a device, null whatever is none of these or not given. Call it once, while recording.
void start_op_arguments(const std::filesystem::path& file);

/// The name of the file, beside the trace.
inline constexpr char kArgumentsFile[] = "arguments";

}  // namespace oomdiag
