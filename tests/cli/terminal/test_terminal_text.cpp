#include "cli/terminal/terminal.h"
#include "cli/terminal/terminal_text.h"
#include "tests/catch.h"

namespace oomdiag {

TEST_CASE("rows lose their bar and blanks on a narrow terminal, and figures stay below each other", "[cli]") {
  const std::string text =
      "  why        capacity: the step needs 14.07 GiB, and 11.48 GiB are available\n\n"
      "  GPU memory at the peak                                              MiB\n"
      "    parameters                                                      64.17  \u2588\u2588\u258a\n"
      "    free                                                         23258.88\n\n"
      "  next: oomdiag explain oomdiag-runs/oomdiag-31800 --all\n";
  CHECK(narrowed(text, 80) == text);
  CHECK(narrowed(text, 60) ==
        "  why        capacity: the step needs 14.07 GiB, and 11.48 GiB are available\n\n"
        "  GPU memory at the peak                                 MiB\n"
        "    parameters                                         64.17\n"
        "    free                                            23258.88\n\n"
        "  next: oomdiag explain oomdiag-runs/oomdiag-31800 --all\n");
}

TEST_CASE("a terminal shows in colour what ran out and what fits, a file does not", "[cli]") {
  const std::string text =
      "oomdiag: out of memory on cuda:0\n\n    half the batch   7.73   yes\n    bf16   9.00   no\n";
  CHECK(terminal_text(text, {}) == text);
  CHECK(terminal_text(text, {.is_terminal = true, .color = true}) ==
        "\033[1;31moomdiag: out of memory on cuda:0\033[0m\n\n    half the batch   7.73  \033[32m yes\033[0m\n"
        "    bf16   9.00  \033[31m no\033[0m\n");
  CHECK(terminal_text("oomdiag: fits\n", {.is_terminal = true, .color = true}) == "\033[1moomdiag: fits\033[0m\n");
}

}  // namespace oomdiag
