#include <nlohmann/json.hpp>

#include "profiler/report/fields.h"
#include "profiler/report/json.h"
#include "profiler/report/json_text.h"

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

/// Writes the members of a value into a JSON object.
class Writer {
 public:
  template <class T>
  void operator()(const char* name, const T& value) {
    json_[name] = convert(value);
  }
  void or_null(const char* name, const std::string& text) { json_[name] = text.empty() ? Json(nullptr) : Json(text); }

  template <class T>
  static Json convert(const T& value) {
    if constexpr (requires(Writer & writer) { visit_fields(writer, value); }) {
      Writer writer;
      visit_fields(writer, value);
      return std::move(writer.json_);
    } else if constexpr (std::is_enum_v<T>) {
      return Json(std::string(name_of(value)));
    } else {
      return Json(value);
    }
  }
  template <class T>
  static Json convert(const std::optional<T>& value) {
    return value ? convert(*value) : Json(nullptr);
  }
  template <class T>
  static Json convert(const std::vector<T>& values) {
    Json json = Json::array();
    for (const T& value : values) json.push_back(convert(value));
    return json;
  }
  static Json convert(const Figures& figures) {
    Json json = Json::object();
    for (const auto& [name, value] : figures) json[name] = value;
    return json;
  }

 private:
  Json json_ = Json::object();
};

}  // namespace

std::string to_json(const Report& report, int indent) {
  const bool used = report.main_device < report.devices.size();
  Json json = {{"schema", kReportSchema},
               {"outcome", report.outcome},
               {"exit_code", Writer::convert(report.exit_code)},
               {"rank", report.rank},
               {"world_size", report.world_size},
               {"steps", report.steps},
               {"steady_steps", report.steady_steps},
               {"still_runs", report.still_runs},
               {"lower_bound", report.lower_bound},
               {"unwatched", report.unwatched},
               {"main_device", report.main_device},
               {"devices", Writer::convert(report.devices)}};
  json["torch"] = report.torch.empty() ? Json(nullptr) : Json(report.torch);
  json["command"] = report.command.empty() ? Json(nullptr) : Json(report.command);
  // The fields of the card that failed, else of the fullest, stand at the top level once more.
  json.update(Writer::convert(used ? report.devices[report.main_device] : ReportOfDevice{}));
  if (!used) json["device"] = nullptr;
  json["ranks"] = Writer::convert(report.ranks);
  json["imbalance"] = Writer::convert(report.imbalance);
  json["limitations"] = report.limitations;
  json["notes"] = Writer::convert(report.notes);
  json["work"] = Writer::convert(report.work);
  json["case"] = Writer::convert(report.reference_case);
  return json_text(json, indent);
}

}  // namespace oomdiag
