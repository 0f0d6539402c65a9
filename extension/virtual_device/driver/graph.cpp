#include "extension/virtual_device/driver/graph.h"

#include <utility>

namespace oomdiag {

void drop_references(UserObject* object, unsigned count) {
  if (object->references > count) {
    object->references -= count;
    return;
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

}  // namespace oomdiag
