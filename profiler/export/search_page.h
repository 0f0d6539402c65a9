#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace oomdiag {

/// One of the things that a search ran, or did not.
struct SearchRow {
  std::string label;
  std::optional<int64_t> measured_bytes{}, reserved_bytes{}, predicted_bytes{};  ///< peaks
  int64_t available_bytes = 0;       ///< what PyTorch may take of the GPU; 0 = not known
  std::optional<bool> fits{};        ///< nullopt: not tried
  std::string note{};                ///< what it costs, or where it fails
  std::vector<std::string> lines{};  ///< to write into the program

  bool operator==(const SearchRow&) const = default;
};

/// SVG above the table, of draw_plans() or draw_surface(); without one there is none.
struct SearchPicture {
  std::string heading{}, note{}, svg{};
};

/// What `fit` or `fix` found.
struct SearchPage {
  std::string text{};     ///< as people read it in a terminal, its first line the headline
  std::string program{};  ///< the command
  bool found = false;     ///< something fits
  std::vector<SearchRow> rows{};
  SearchPicture picture{};
};

/// One page that needs no other file, asks for none and runs no script.
std::string to_html(const SearchPage& page);

}  // namespace oomdiag
