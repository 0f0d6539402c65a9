#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/device/device.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/forking_python.h"
#include "cli/process/temporary_folder.h"
#include "profiler/shape_function/single_call.h"

namespace oomdiag {
namespace {

MadeAlone parse_sizes(const std::string& line) {
  const auto sizes = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!sizes.is_array()) return std::nullopt;
  std::vector<int64_t> made;
  int64_t requests = 0;
  for (const auto& size : sizes) {
    if (!size.is_number_integer() || size.get<int64_t>() < -requests) return std::nullopt;
    made.push_back(size.get<int64_t>());
    requests += made.back() >= 0 ? 1 : 0;
  }
  return made;
}

}  // namespace

std::vector<MadeAlone> Fitter::make_alone(const std::vector<std::string>& calls) {
  std::set<std::string> missing;
  for (const std::string& call : calls) {
    if (!made_alone_.contains(call)) missing.insert(call);
  }
  const auto python = python_and_script(request_.program);
  if (!missing.empty() && python && request_.device.is_virtual()) {
    const TemporaryFolder folder;
    const std::filesystem::path list = folder.path() / "calls", sizes = folder.path() / "sizes";
    {
      std::ofstream out(list);
      for (const std::string& call : missing) out << call << '\n';
    }
    ExperimentRequest request{
        .program = {python->front(), experiments_.install().injected() / "oomdiag_calls.py", list, sizes},
        .device = request_.device};
    if (auto* const host = std::get_if<VirtualHost>(&request.device.device)) host->memory_bytes = kMaxGpuBytes;
    experiments_.run(request, on_done_);
    std::ifstream in(sizes);
    auto call = missing.begin();
    for (std::string line; call != missing.end() && std::getline(in, line); ++call)
      made_alone_[*call] = parse_sizes(line);
  }
  std::vector<MadeAlone> made;
  for (const std::string& call : calls) made.push_back(made_alone_[call]);  // what could not be made is not tried again
  return made;
}

}  // namespace oomdiag
