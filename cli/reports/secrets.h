#pragma once

#include <string>
#include <vector>

namespace oomdiag {

/// What names somebody: of the user and of the machine. For sharing.
std::vector<std::string> find_secrets();

}  // namespace oomdiag
