#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace oomdiag {

/// "A100-40gb" as "a10040gb": without what may be typed in several ways.
std::string plain_name(std::string_view name);

/// Letters to insert, delete, replace or swap with their neighbour to make `left` into `right`.
std::size_t edit_distance(std::string_view left, std::string_view right);

/// The names that somebody who typed `requested` probably meant: at most three, best first. Case, '-', '_' and spaces
/// do not count, and a name that contains what was typed is near.
std::vector<std::string> nearest(std::string_view requested, const std::vector<std::string>& names);

/// A hint: "did you mean rtx3060 or rtx3090? " followed by `otherwise`, or `otherwise` alone if no name is near.
std::string did_you_mean(std::string_view requested, const std::vector<std::string>& names, std::string_view otherwise);

}  // namespace oomdiag
