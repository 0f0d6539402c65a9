#pragma once

/// Puts a file into the program when that is built, by the assembler: its bytes from oomdiag_<name> to oomdiag_<name>_end.
#define OOMDIAG_EMBED(name, file)                                                                  \
  asm(".section .rodata\n.global oomdiag_" #name "\n.global oomdiag_" #name "_end\noomdiag_" #name \
      ":\n.incbin \"" file "\"\noomdiag_" #name "_end:\n.byte 0\n.text\n");                        \
  extern "C" const char oomdiag_##name[];                                                          \
  extern "C" const char oomdiag_##name##_end[]
