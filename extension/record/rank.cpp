#include "extension/record/rank.h"

#include "extension/record/internal_names.h"
#include "extension/record/python_api.h"
#include "extension/record/session.h"

namespace oomdiag {

void note_rank(const PythonApi& api) {
  const PythonReader reader(api);
  if (!reader.find("torch.distributed.distributed_c10d", "init_process_group")) return;  // not loaded
  const PythonRef world = reader.find("torch.distributed.distributed_c10d", "_world");
  const PythonRef group_type = reader.find("torch._C._distributed_c10d", "ProcessGroup");
  const PythonRef group = world ? reader.entry(reader.dict_of(world.get()).get(), "_default_pg") : PythonRef();
  if (!group || !group_type) return note_missing(InternalName::default_group);
  const PythonRef type(api, api.type(group.get()));
  if (type.get() != group_type.get()) return;  // none yet, or one that is written in Python
  const PythonRef rank = reader.call_builtin(group.get(), "rank");
  const PythonRef size = reader.call_builtin(group.get(), "size");
  if (!rank || !size) return note_missing(InternalName::default_group);
  session().writer().header().rank = static_cast<int>(api.to_long(rank.get()));
  session().writer().header().world_size = static_cast<int>(api.to_long(size.get()));
}

}  // namespace oomdiag
