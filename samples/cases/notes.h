#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "profiler/report/report.h"
#include "samples/cases/case_run.h"
#include "samples/cases/note.h"

namespace oomdiag {

/// What the runs of a sample show about its case, "S10" say. The run that the report is about comes first; the others are
/// what it is compared with. Pure: everything that is said comes from the runs. A case that is not known is a table of
/// peaks, and a run alone of such a case says nothing.
std::optional<ReportCase> explain_case(std::string_view id, std::string_view about, std::span<const CaseRun> runs);

/// The same for a run on the host: its bytes by phase, as the program printed them ("host_forward_bytes").
ReportCase explain_host(std::string_view id, std::string_view about, const std::map<std::string, std::string>& facts);

// One function per case. Those that compare take what they find among the runs: a variant may have failed.
using Runs = std::span<const CaseRun>;
void note_host_and_gpu(Note& note, Runs runs);        // S1
void note_kept_outputs(Note& note, Runs runs);        // S2
void note_accumulation(Note& note, Runs runs);        // S3
void note_mixed_precision(Note& note, Runs runs);     // S4
void note_checkpointing(Note& note, Runs runs);       // S5
void note_classifier(Note& note, Runs runs);          // S6, S7
void note_hidden_memory(Note& note, Runs runs);       // S8
void note_copy(Note& note, Runs runs);                // S9
void note_zero_grad(Note& note, Runs runs);           // S10
void note_growth(Note& note, Runs runs);              // S11
void note_fragmentation(Note& note, Runs runs);       // S12
void note_small_model(Note& note, Runs runs);         // S13
void note_temporaries(Note& note, Runs runs);         // S14
void note_needless_gradients(Note& note, Runs runs);  // S15
void note_duplicates(Note& note, Runs runs);          // S16
void note_two_heads(Note& note, Runs runs);           // S17
void note_data_loading(Note& note, Runs runs);        // S18
void note_shrunk_weights(Note& note, Runs runs);      // S19

}  // namespace oomdiag
