#include "profiler/replay/graphs.h"

namespace oomdiag {

void Graphs::begin_walk(bool at_refusal) {
  if (!open_ || at_refusal) ++walk_;
  if (open_) return;
  open_ = true;
  ++graph_;
  ended_ = kNoEvent;
  alike_ = std::make_shared<Alike>();
}

bool Graphs::end_walk(uint64_t index) {
  if (!open_) return false;
  open_ = false;
  ended_ = index;
  return true;
}

void Graphs::save(const Event& event, Row& row) {
  const Saver saver{.node_sequence = event.node_sequence,
                    .context = event.context,
                    .shape = static_cast<uint32_t>(event.detail),
                    .graph = graph_,
                    .walk = walk_,
                    .node_thread = event.node_thread};
  row.ever_saved = true;
  if (!row.savers.empty() && row.savers.front().graph != graph_) row.savers.clear();
  row.savers.push_back(saver);
  if (row.is_known() && row.maker.op_serial != 0) (*alike_)[likeness_of(row)].push_back(saver);
}

const std::vector<Saver>& savers_alike(const Alike& alike, const Row& row) {
  static const std::vector<Saver> kNobody;
  if (row.maker.op_serial == 0) return kNobody;
  const auto found = alike.find(likeness_of(row));
  return found == alike.end() ? kNobody : found->second;
}

}  // namespace oomdiag
