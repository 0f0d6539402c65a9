#include "samples/cases/notes.h"

#include <array>

#include "profiler/report/report.h"
#include "samples/cases/bytes.h"
#include "samples/cases/case_run.h"
#include "samples/cases/note.h"

namespace oomdiag {
namespace {

struct Case {
  std::string_view id;
  void (*note)(Note&, Runs);
};

constexpr std::array kCases = {
    Case{"S1", note_host_and_gpu},    Case{"S2", note_kept_outputs},  Case{"S3", note_accumulation},
    Case{"S4", note_mixed_precision}, Case{"S5", note_checkpointing}, Case{"S6", note_classifier},
    Case{"S7", note_classifier},      Case{"S8", note_hidden_memory}, Case{"S9", note_copy},
    Case{"S10", note_zero_grad},      Case{"S11", note_growth},       Case{"S12", note_fragmentation},
    Case{"S13", note_small_model},    Case{"S14", note_temporaries},  Case{"S15", note_needless_gradients},
    Case{"S16", note_duplicates},     Case{"S17", note_two_heads},    Case{"S18", note_data_loading},
    Case{"S19", note_shrunk_weights}};

}  // namespace

std::optional<ReportCase> explain_case(std::string_view id, std::string_view about, Runs runs) {
  Note note(id, about);
  for (const Case& one : kCases) {
    if (one.id != id || runs.empty()) continue;
    one.note(note, runs);
    return note.finish();
  }
  if (runs.size() < 2) return std::nullopt;
  note.compare(runs, {{"peak", peak_of}});
  return note.finish();
}

ReportCase explain_host(std::string_view id, std::string_view about, const std::map<std::string, std::string>& facts) {
  const CaseRun run{.variant = "host", .report = {}, .scopes = {}, .facts = facts};
  Note note(id, about);
  std::vector<std::pair<std::string, std::vector<int64_t>>> rows;
  for (const std::string part : {"forward", "backward", "optimizer", "peak", "resident"}) {
    const std::string name = "host_" + part + "_bytes";
    if (!facts.contains(name)) continue;
    rows.emplace_back(part, std::vector{fact_of(run, name)});
    note.figure(name, fact_of(run, name));
  }
  note.table("on the host", {"bytes"}, rows);
  if (facts.contains("loss")) note.say("The last loss is " + facts.at("loss") + ".");
  if (facts.contains("raised")) note.say("It raised: " + facts.at("raised"));
  return note.finish();
}

}  // namespace oomdiag
