#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

/// The bytes of a file that is embedded elsewhere.
#define OOMDIAG_EMBEDDED(name)            \
  extern "C" const char oomdiag_##name[]; \
  extern "C" const char oomdiag_##name##_end[]

/// Puts a file into the program when that is built, by the assembler: its bytes from oomdiag_<name> to oomdiag_<name>_end.
#define OOMDIAG_EMBED(name, file)                                                                  \
  asm(".section .rodata\n.global oomdiag_" #name "\n.global oomdiag_" #name "_end\noomdiag_" #name \
      ":\n.incbin \"" file "\"\noomdiag_" #name "_end:\n.byte 0\n.text\n");                        \
  OOMDIAG_EMBEDDED(name)

namespace oomdiag {

/// What is to stand in the place of a mark of a page.
struct Filling {
  std::string_view mark;
  std::string with;
};

/// The page with each mark, where it first stands, filled in. Marks in what is filled in are text.
inline std::string fill_in(std::string_view page, const std::vector<Filling>& fillings) {
  std::map<size_t, const Filling*> by_place;
  for (const Filling& filling : fillings) by_place.emplace(page.find(filling.mark), &filling);
  by_place.erase(page.npos);
  std::string filled;
  size_t copied = 0;
  for (const auto& [place, filling] : by_place) {
    filled.append(page.substr(copied, place - copied)).append(filling->with);
    copied = place + filling->mark.size();
  }
  return filled.append(page.substr(copied));
}

}  // namespace oomdiag
