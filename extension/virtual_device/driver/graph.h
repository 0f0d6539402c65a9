#pragma once

#include <cuda.h>

#include <functional>
#include <memory>
#include <vector>

namespace oomdiag {

struct GraphNode {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  std::vector<GraphNode*> dependencies;
};

/// An object whose life graphs prolong: `destroy` is called when the last reference goes.
struct UserObject {
  void* object = nullptr;
  CUhostFn destroy = nullptr;
  unsigned references = 1;
};

/// Not under a lock, as `destroy` is the program's; the same holds for what frees a graph.
void drop_references(UserObject* object, unsigned count);

/// What a graph and the executables made of it share.
struct GraphBody {
  std::vector<std::unique_ptr<GraphNode>> nodes;
  std::vector<UserObject*> retained;           ///< one entry for each reference
  int64_t time_ns = 0;                         ///< of all its work, one after the other
  std::vector<std::function<void()>> actions;  ///< what it does with contents, in the order of capture

  GraphBody() = default;
  GraphBody(const GraphBody&) = delete;
  ~GraphBody();

  GraphNode* add_node(CUgraphNodeType type, std::vector<GraphNode*> dependencies);

  /// What an executable takes of its GPU.
  int64_t executable_bytes() const;
};

struct Graph {
  std::shared_ptr<GraphBody> body = std::make_shared<GraphBody>();
};

inline CUgraph graph_handle(Graph* graph) { return reinterpret_cast<CUgraph>(graph); }
inline Graph* find_graph(CUgraph handle) { return reinterpret_cast<Graph*>(handle); }

}  // namespace oomdiag
