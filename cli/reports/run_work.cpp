#include "cli/reports/run_work.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/device/gpus.h"
#include "cli/process/files.h"
#include "cli/reports/run_folder.h"
#include "profiler/cost/communication.h"
#include "profiler/cost/metered_operator.h"
#include "profiler/cost/operator_work.h"
#include "profiler/cost/step_work.h"
#include "profiler/cost/time_model.h"
#include "profiler/error.h"
#include "profiler/export/tables.h"
#include "profiler/report/make/report_work.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

std::optional<MeteredRun> read_metered_run(const std::filesystem::path& trace) {
  const std::filesystem::path file = trace.parent_path() / kWorkFile;
  if (!is_there(file)) return std::nullopt;
  return parse_metered_run(read_file(file));
}

std::string gpu_of(const Report& report) {
  const ReportOfDevice* const device = main_device_of(report);
  return device != nullptr ? device->device.name : "";
}

/// The device file that the run used for the device that its report is about, as run.json has it; empty for a real GPU.
std::filesystem::path device_file_of(const std::filesystem::path& trace, const Report& report) {
  std::ifstream stream(run_config_file(trace.parent_path()));
  const auto json = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("device") || !json["device"].is_string()) return {};
  const ReportOfDevice* const device = main_device_of(report);
  std::istringstream files(json["device"].get<std::string>());
  std::string file, of_device;
  for (int i = 0; device != nullptr && i <= device->device.index && std::getline(files, file, ','); ++i)
    of_device = file;
  return of_device;
}

std::optional<DeviceRates> rates_of_run(const std::filesystem::path& trace, const Report& report) {
  return rates_of_device(gpu_of(report), device_file_of(trace, report));
}

std::string nanoseconds(double ns) { return fmt::format("{:.0f}", ns); }

/// Dtypes and shapes of the tensors that an operator takes, as in "Float 8x3x14x14, Float 4x3x3x3~". One of no dimensions has its dtype alone.
std::string describe_inputs(const MeteredOperator& metered) {
  std::string text;
  for (const WorkValue& value : metered.inputs) {
    if (!value.is_tensor()) continue;
    text += fmt::format("{}{}{}{}{}", text.empty() ? "" : ", ", value.dtype, value.values.empty() ? "" : " ",
                        fmt::join(value.values, "x"), value.strided ? "~" : "");
  }
  return text;
}

/// A collective computes nothing and starts one kernel; its time is that of its links.
std::string csv_row(const MeteredOperator& metered, const Communication& call, const Trace& trace,
                    const std::optional<Links>& links) {
  const auto ns = links ? communication_ns(call, *links) : std::nullopt;
  return fmt::format("{},{},{},{},communication,,,{},0,0,{:.0f},1,1,1,,,,,{},{}\n", metered.step, metered.phase,
                     csv_cell(trace.name(metered.module)), csv_cell(metered.name), metered.count, call.bytes_on_links(),
                     ns ? nanoseconds(*ns) : "", csv_cell(describe_inputs(metered)));
}

std::string csv_row(const MeteredOperator& metered, const Trace& trace, const std::optional<DeviceRates>& rates) {
  const OperatorWork work = work_of(metered);
  const auto peak = rates ? peak_time(work, *rates) : std::nullopt;
  const auto time = rates ? modelled_time(work, *rates) : std::nullopt;
  return fmt::format(
      "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", metered.step, metered.phase,
      csv_cell(trace.name(metered.module)), csv_cell(metered.name), name_of(work.kind), name_of(work.precision),
      rates ? name_of(family_of(work, *rates)) : "", metered.count, work.flops(), work.memory_bytes, work.bus_bytes,
      work.launches, work.tensors, work.is_metered ? 1 : 0, peak ? nanoseconds(peak->compute_ns) : "",
      peak ? nanoseconds(peak->memory_ns) : "", peak ? nanoseconds(peak->bus_ns) : "",
      peak ? nanoseconds(peak->turns_ns) : "", time ? nanoseconds(time->ns) : "", csv_cell(describe_inputs(metered)));
}

}  // namespace

std::optional<ReportWork> read_run_work(const std::filesystem::path& file, const Trace& trace,
                                        const Report& report) try {
  const auto run = read_metered_run(file);
  if (!run) return std::nullopt;
  const std::string gpu = gpu_of(report);
  const auto rates = rates_of_run(file, report);
  const auto step = work_of_last_step(*run, rates ? &*rates : nullptr, report.outcome == "ok");
  if (!step) return std::nullopt;
  ReportWork work = make_report_work(*step, trace);
  if (!work.step_time_ns) {
    work.why_no_time = rates ? fmt::format("the device file of {} lacks a rate that this step needs", gpu)
                             : fmt::format("no device file has the rates of {}", gpu);
  }
  return work;
} catch (const Error&) {
  return std::nullopt;  // cut off when the program was killed: the report does without
}

std::map<std::string, double> read_forward_times(const std::filesystem::path& file, const Trace& trace,
                                                 const Report& report) try {
  const auto run = read_metered_run(file);
  const auto rates = rates_of_run(file, report);
  const auto step = run && rates ? work_of_last_step(*run, &*rates, report.outcome == "ok") : std::nullopt;
  if (!step || !step->has_time) return {};
  const bool is_host_bound = step->bound_by() == BoundBy::host;
  std::map<std::string, double> times;
  for (const auto& [module, work] : step->forward) {
    times[std::string(trace.name(module))] += is_host_bound ? work.host_ns : work.time_ns;
  }
  return times;
} catch (const Error&) {
  return {};
}

std::string work_to_csv(const std::filesystem::path& file, const Trace& trace, const Report& report,
                        const std::string& device) {
  const auto run = read_metered_run(file);
  if (!run) throw Error(ErrorKind::usage, "the run was not metered", "oomdiag run --meter -- PROGRAM");
  const auto rates = device.empty() ? rates_of_run(file, report) : rates_of_device(device);
  if (!device.empty() && !rates)
    throw Error(ErrorKind::usage, fmt::format("--device {} is no GPU", device), "see: oomdiag devices");
  std::string text =
      "step,phase,module,operator,kind,dtype,family,calls,flops,memory_bytes,bus_bytes,launches,tensors,metered,"
      "compute_ns,memory_ns,"
      "bus_ns,turns_ns,modelled_ns,inputs\n";
  const auto links = rates ? std::optional(links_of(*rates, run->links, run->ranks_per_host)) : std::nullopt;
  for (const MeteredOperator& metered : run->operators) {
    const auto call = communication_of(metered);
    text += call ? csv_row(metered, *call, trace, links) : csv_row(metered, trace, rates);
  }
  return text;
}

}  // namespace oomdiag
