#pragma once

#include <string_view>

// How the recorder names what refers to a tensor (extension/record/tensor_referrers.h), as far as the profiler reads it again
// (profiler/explain):
//
//   list 'history' in train.py
//   dict 'optimizer.state' in fit(), whose frame the traceback in 'failed' keeps
//   lru_cache of 'load' in train.py
//   dict of functions 'model.callbacks' in main (train.py:17), which refer to the tensors in their turn
//
// The first word is the Python type of the object, or "variable" or "attribute" where that is the tensor itself.
namespace oomdiag {

inline constexpr std::string_view kFrameOfTraceback = "whose frame the traceback in ";
inline constexpr std::string_view kKeepsFrame = " keeps";
inline constexpr std::string_view kCacheOfResults =
    "lru_cache of ";  ///< functools.lru_cache, and what a function returned
inline constexpr std::string_view kOfFunctions =
    " of functions";  ///< their closures, defaults or objects have the tensors

/// Whether the variable is a container, or an attribute of a container's items where these count as one ("nets[*].seen").
inline bool is_container(std::string_view variable) {
  const std::string_view type = variable.substr(0, variable.find(' '));
  return type == "list" || type == "deque" || type == "dict" || type == "OrderedDict" || type == "set" ||
         type == "tuple" || variable.find("[*]") != variable.npos;
}

}  // namespace oomdiag
