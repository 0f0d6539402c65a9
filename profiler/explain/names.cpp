#include "profiler/explain/findings.h"
#include "profiler/explain/owners.h"

namespace oomdiag {

std::string_view name_of(GrowthKind kind) {
  switch (kind) {
    case GrowthKind::retained_graph:
      return "retained_graph";
    case GrowthKind::kept_tensors:
      return "kept_tensors";
    case GrowthKind::growing_buffer:
      return "growing_buffer";
  }
  return "kept_tensors";
}

std::string_view name_of(Keeper keeper) {
  switch (keeper) {
    case Keeper::autograd:
      return "autograd";
    case Keeper::module:
      return "module";
    case Keeper::optimizer:
      return "optimizer";
    case Keeper::operation:
      return "operation";
    case Keeper::library:
      return "library";
    case Keeper::program:
      return "program";
  }
  return "program";
}

}  // namespace oomdiag
