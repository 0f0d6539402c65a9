// The two classifiers: the report is the explanation; the note adds the largest batch and what is wrong with published code.

#include <fmt/format.h>

#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/shape.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "samples/cases/bytes.h"
#include "samples/cases/case_run.h"
#include "samples/cases/note.h"
#include "samples/cases/notes.h"

namespace oomdiag {
namespace {

/// Inputs of the classifier: columns of the parameter [10, n].
int64_t inputs_of_classifier(const CaseRun& run) {
  for (const ReportOwner& owner : gpu_of(run).allocations) {
    const auto shape = parse_shape(owner.shape);
    if (owner.category == Category::parameter && shape.size() == 2) return shape[1];
  }
  return 0;
}

}  // namespace

void note_classifier(Note& note, Runs runs) {
  const CaseRun& run = runs.front();
  const ReportOfDevice& device = gpu_of(run);
  if (device.batch) {
    note.figure("largest_batch", device.batch->largest_batch);
    const int64_t batch = device.batch->batch, largest = device.batch->largest_batch;
    const std::string gpu = with_unit(device.device.total_bytes);
    if (!device.failure && largest > 0) {
      note.say(fmt::format("A batch of {} peaks at {}; on this GPU, {}, up to {} should fit (predicted).", batch,
                           with_unit(peak_of(run)), gpu, largest));
    } else if (largest > 0 && largest < batch - 1) {
      note.say(
          fmt::format("A batch of {} does not fit on this GPU, {}; at most {} does (predicted).", batch, gpu, largest));
    } else if (device.failure) {  // fragmentation, or the rest of the step would have been more
      note.say(fmt::format(
          "A batch of {} does not fit on this GPU, {}; the moment of the failure does not show which one does.", batch,
          gpu));
    }
  }
  constexpr int64_t kPublished = 128 * 4 * 4;
  const int64_t inputs = inputs_of_classifier(run);
  if (inputs != 128 * 8 * 8) return;
  note.figure("classifier_inputs", inputs);
  note.say(
      fmt::format("The classifier takes {} inputs, 128 maps of 8x8. Published code of this net has {} (128 maps of "
                  "4x4): a shape error, three poolings of 64 leave 8.",
                  inputs, kPublished));
}

}  // namespace oomdiag
