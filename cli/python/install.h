#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace oomdiag {

/// Where the parts of oomdiag lie, and which torch they are for. They need not exist.
struct Install {
  std::filesystem::path libraries{};       ///< liboomdiag_preload.so, liboomdiag_reports.so
  std::filesystem::path virtual_device{};  ///< the libraries that stand in for CUDA's
  std::filesystem::path samples{};         ///< the program with the reference models
  std::filesystem::path models{};          ///< the list of those models, made when they were built
  std::filesystem::path gpus{};            ///< the catalogue, one JSON file per GPU
  std::filesystem::path sources{};         ///< of what is built for each torch
  std::filesystem::path units{};           ///< a list of those sources, by the file that they are compiled in
  std::filesystem::path python{};          ///< to be taken where nobody names one
  std::filesystem::path recorder{};        ///< liboomdiag.so for `torch_version`; empty = none
  std::filesystem::path contents{};  ///< the library with which the virtual device knows what memory holds, likewise
  std::string torch_version{};       ///< "2.15.0+cu132"; empty = no torch is known yet
  int cuda_major{};                  ///< of the torch of the program that will run, 13; 0 = not known, or several may
  std::string architectures{};       ///< that this torch has code for, "75,80"; empty = not asked
  std::string no_recorder{};         ///< why there is none, one line

  /// What a Python imports when it starts: fixes, and the absent ranks of a job.
  std::filesystem::path injected() const { return libraries / "python" / "fixes" / "site-packages"; }
};

/// The build that this executable belongs to, or the installation.
Install find_install();

/// "2.15" of "2.15.0+cu132".
std::string_view minor_of(std::string_view version);

}  // namespace oomdiag
