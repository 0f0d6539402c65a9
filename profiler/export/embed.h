#pragma once

#include <string>
#include <string_view>

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

/// Puts `with` in the place of the first `mark` of a page.
inline void fill_in(std::string& page, std::string_view mark, std::string_view with) {
  if (const size_t at = page.find(mark); at != page.npos) page.replace(at, mark.size(), with);
}

}  // namespace oomdiag
