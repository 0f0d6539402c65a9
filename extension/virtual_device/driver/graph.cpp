#include "extension/virtual_device/driver/graph.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "extension/virtual_device/driver/stream.h"

namespace oomdiag {

void drop_references(UserObject* object, unsigned count) {
  {
    std::lock_guard guard(stream_lock());
    const bool is_kept = object->references > count;
    if (is_kept) object->references -= count;
    if (is_kept) return;
  }
  object->destroy(object->object);
  delete object;
}

GraphBody::~GraphBody() {
  for (UserObject* object : retained) drop_references(object, 1);
}

GraphNode* GraphBody::add_node(CUgraphNodeType type, std::vector<GraphNode*> dependencies) {
  nodes.push_back(std::make_unique<GraphNode>(GraphNode{.type = type, .dependencies = std::move(dependencies)}));
  return nodes.back().get();
}

// 16 KiB for each kernel is what the graphs of large language models take on GPUs: 24 MiB for a decoding step of a
// thousand kernels (vllm-project/vllm issue 50780), 18 MiB (pull request 5515).
int64_t GraphBody::executable_bytes() const {
  constexpr int64_t kKernelBytes = 16 << 10;
  return kKernelBytes * std::count_if(nodes.begin(), nodes.end(),
                                      [](const auto& node) { return node->type == CU_GRAPH_NODE_TYPE_KERNEL; });
}

}  // namespace oomdiag
