#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <map>

#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/shape.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"
#include "profiler/trace/stack_call.h"

// Rows of kReasons about how much goes through a model at once: a batch, images, rows, and in which type.

namespace oomdiag {
namespace {

bool convolves(const ReasonFacts& facts) {
  return std::ranges::any_of(facts.device.state.blocks, [](const LiveBlock& block) {
    return block.category == Category::parameter && parse_shape(block.shape).size() >= 4;
  });
}

}  // namespace

// Training computes in half precision, and what comes after it does not.
Found find_not_under_autocast(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->where.module.empty() || builds_graph(facts).value_or(true)) return {};
  const auto is_cast = [](const StepAllocation& block) { return block.is_of_step() && !block.made.autocast.empty(); };
  const bool has_cast = std::ranges::any_of(facts.device.complete.blocks, is_cast);
  const bool casts =
      !failed->where.autocast.empty() || std::ranges::any_of(facts.device.step_allocations.blocks, is_cast);
  const Share work = sum_blocks(facts, [](const LiveBlock& block) {
    return block.category == Category::output || block.category == Category::temporary;
  });
  const int64_t bytes = work.bytes + failed->requested_bytes;
  if (!has_cast || casts || !is_large(facts, bytes)) return {};
  return Reason{.text = fmt::format(
                    "training runs under autocast, and this part does not: {} in full precision at layer '{}' ({})",
                    with_unit(bytes), failed->where.module, short_place(failed->where)),
                .bytes = bytes / 2,
                .fix = "autocast_here_too",
                .how = {"with torch.no_grad(), torch.autocast(\"cuda\", torch.float16):  # around the evaluation, as "
                        "around training"}};
}

namespace {

/// Of those whose shape is known.
Share find_largest_shaped(const ReasonFacts& facts) {
  return sum_blocks(facts, [](const LiveBlock& block) { return is_data(block) && !block.shape.empty(); });
}

/// The shape of the largest tensor, "[1, 24, 1536000]", if it is of one sample, whose dimensions after the channels are all that is large;
/// else empty.
std::string find_single_sample(const ReasonFacts& facts) {
  const Share largest = find_largest_shaped(facts);
  if (largest.largest == nullptr || !is_large(facts, largest.largest->bytes, 0.1)) return {};
  const std::string shape(largest.largest->shape.substr(0, largest.largest->shape.find(']') + 1));
  const std::vector<int64_t> sizes = parse_shape(shape);
  return sizes.size() == 3 && sizes.front() == 1 && sizes.back() > 8 * sizes[1] ? shape : "";
}

/// Whether the largest tensor is a table of many rows, as of states, points or pairs.
bool has_many_rows(const ReasonFacts& facts) {
  constexpr int64_t kMany = 4096;
  const Share largest = find_largest_shaped(facts);
  const std::vector<int64_t> sizes =
      largest.largest == nullptr ? std::vector<int64_t>() : parse_shape(largest.largest->shape);
  return sizes.size() == 2 && sizes.front() >= kMany;
}

}  // namespace

namespace {

/// [batch, channels, height, width], or with a depth before the height: images or volumes, and no result of a layer.
bool is_of_images(const std::vector<int64_t>& shape) {
  constexpr int64_t kMaxChannels = 4;
  const bool has_values = std::ranges::all_of(shape, [](int64_t size) { return size > 0; });
  return (shape.size() == 4 || shape.size() == 5) && has_values && shape[1] <= kMaxChannels;
}

bool is_of_large_images(const std::vector<int64_t>& shape) {
  constexpr int64_t kManyPixels = 1'000'000, kLongest = 16;  // times the other side: else a spectrogram
  if (shape.size() != 4 || !is_of_images(shape)) return false;
  const auto [shorter, longer] = std::minmax(shape[2], shape[3]);
  return shorter * longer >= kManyPixels && longer <= kLongest * shorter;
}

/// The largest images that the step works on, if their shape is such a one.
const LiveBlock* find_images(const ReasonFacts& facts, bool (*is_such)(const std::vector<int64_t>& shape)) {
  return sum_blocks(facts,
                    [&](const LiveBlock& block) {
                      return is_data(block) && block.made.module.empty() && is_such(parse_shape(block.shape));
                    })
      .largest;
}

}  // namespace

// A program that never trains, or the evaluation of one that does, where a layer's outputs are as large as all else.
Found find_large_batch(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->where.module.empty() || contains(failed->stack, "utils/checkpoint.py")) return {};
  const bool has_trained = facts.device.attribution.backward_bytes > 0 || trains(facts);
  const std::optional<bool> graph = fails_in_graph(facts);
  const bool only_infers = failed->modules_evaluate && !has_trained && !wants_gradient_of_data(facts);
  if (graph.value_or(has_trained) && !only_infers) return {};
  const Share saved = sum_category(facts, Category::activation);
  const Share work = sum_blocks(facts, [](const LiveBlock& block) {
    return block.category == Category::output || block.category == Category::temporary ||
           block.category == Category::workspace;
  });
  if (is_large(facts, saved.bytes, 0.1) || !is_large(facts, work.bytes + failed->requested_bytes, 0.5)) return {};
  const std::string one = find_single_sample(facts);
  constexpr int64_t kParts = 8;                     // of a batch whose size is known
  constexpr int64_t kFewImages = 4, kFewRows = 16;  // of another one
  const LiveBlock* const images = find_images(facts, is_of_images);
  const int64_t batch = images == nullptr ? facts.batch : parse_shape(images->shape).front();
  const bool is_one_image = images != nullptr && batch == 1 && one.empty();
  const int64_t size_of_part = batch > 1          ? std::max<int64_t>(1, batch / kParts)
                               : convolves(facts) ? kFewImages
                                                  : kFewRows;
  std::vector<std::string> lines{
      has_many_rows(facts)
          ? std::string("y = torch.cat([model(part) for part in x.split(1024)])  # or reduce each part at once")
          : fmt::format("y = torch.cat([model(part) for part in x.split({})])  # in {}", size_of_part,
                        find_caller_of_model(parse_stack(failed->stack), failed->where))};
  if (is_one_image) lines.clear();
  if (!one.empty())
    lines = {
        "y = torch.cat([model(part) for part in x.split(65536, -1)], -1)  # windows, or tiles of an image; they "
        "overlap "
        "where layers see beyond their edges"};
  else if (convolves(facts))
    lines.emplace_back(
        "x = F.interpolate(x, scale_factor=0.5)  # where one image is too large; or tiles that overlap: x[..., :512]");
  const std::string what = !one.empty()       ? "length of one sample"
                           : is_one_image     ? "image"
                           : convolves(facts) ? "batch or image"
                                              : "batch";
  return Reason{
      .text = fmt::format("the whole {}{} goes through the model at once{}: {} at layer '{}' ({})", what,
                          !one.empty()      ? ", " + one + ","
                          : facts.batch > 1 ? fmt::format(", {} at a time,", facts.batch)
                                            : "",
                          graph == false ? ", without gradients" : "", with_unit(work.bytes + failed->requested_bytes),
                          failed->where.module, short_place(failed->where)),
      .bytes = (work.bytes + failed->requested_bytes) / 2,
      .fix = is_one_image ? "smaller_images" : "split_batch",
      .how = std::move(lines)};
}

Found find_large_images(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->where.module.empty() || !convolves(facts)) return {};
  if (!builds_graph(facts).value_or(false)) return {};  // parts of them will do
  const LiveBlock* const images = find_images(facts, is_of_large_images);
  const Share work =
      sum_blocks(facts, [](const LiveBlock& block) { return is_data(block) && !block.made.module.empty(); });
  const int64_t bytes = work.bytes + failed->requested_bytes;
  if (images == nullptr || !is_large(facts, bytes, 0.5)) return {};
  const std::vector<int64_t> shape = parse_shape(images->shape);
  const Referrer* const referrer = facts.referrers.find(*images);
  return Reason{
      .text = fmt::format("images of {} × {} pixels go through the model as they are{}{}: {} at layer '{}' ({})",
                          shape[2], shape[3], comma_shape(*images),
                          referrer == nullptr ? "" : fmt::format(" in {}", referrer->variable), with_unit(bytes),
                          failed->where.module, short_place(failed->where)),
      .bytes = bytes / 4 * 3,
      .fix = "smaller_images"};
}

namespace {

/// How many channels a layer's result has at each pixel of the images; 0 where it has none, or fewer pixels. Its shape is known of what a
/// node has saved, and of others by their size.
int64_t count_channels(const LiveBlock& block, const LiveBlock& images) {
  const std::vector<int64_t> sizes = parse_shape(images.shape), shape = parse_shape(block.shape);
  if (!shape.empty()) {
    const bool has_all = shape.size() == sizes.size() && shape[0] == sizes[0] &&
                         std::equal(shape.begin() + 2, shape.end(), sizes.begin() + 2);
    return has_all ? shape[1] : 0;
  }
  const int64_t of_one_channel = images.requested_bytes / sizes[1];
  const bool is_exact = of_one_channel > 0 && block.requested_bytes % of_one_channel == 0;
  const bool may_be_images = any_op(block.made, {"aten::conv2d", "aten::conv3d", "aten::batch_norm"});
  return is_exact && may_be_images ? block.requested_bytes / of_one_channel : 0;
}

}  // namespace

// The first layers of a network that was made for small images, or of one that keeps all pixels up to its end.
Found find_full_resolution(const ReasonFacts& facts) {
  constexpr int64_t kManyChannels = 16;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !convolves(facts) || !builds_graph(facts).value_or(true)) return {};
  const LiveBlock* const images = find_images(facts, is_of_images);
  if (images == nullptr) return {};
  const Share results = sum_blocks(facts, [&](const LiveBlock& block) {
    return is_data(block) && !block.made.module.empty() && count_channels(block, *images) >= kManyChannels;
  });
  // Where many layers have all pixels the network is meant to: a U-Net, or one that works on what an encoder made of images. Where each
  // image takes little, it is the batch.
  constexpr double kWorthOfOne = 0.15, kWorthOfImage = 0.01;
  if (results.largest == nullptr || !is_large(facts, results.largest->bytes, kWorthOfOne)) return {};
  if (!is_large(facts, results.largest->bytes / parse_shape(images->shape)[0], kWorthOfImage)) return {};
  const bool asks = failed->requested_bytes == results.largest->requested_bytes;
  const int64_t bytes = results.bytes + (asks ? failed->requested_bytes : 0);
  if (!is_large(facts, bytes, 0.5)) return {};
  return Reason{
      .text =
          fmt::format("layers work at all pixels of the images{}: what has their size takes {}, as the result of '{}' "
                      "with {} channels ({})",
                      comma_shape(*images), with_unit(bytes), results.largest->made.module,
                      count_channels(*results.largest, *images), short_place(results.largest->made)),
      .bytes = bytes / 4 * 3,
      .fix = "smaller_images",
      .how = {"nn.Conv2d(3, channels, 7, stride=2, padding=3)  # the first layer, or a pooling behind it: a "
              "quarter from there on",
              "images = F.interpolate(images, scale_factor=0.5)  # or as they are loaded: transforms.Resize(…)"}};
}

namespace {

/// What a layer works on at once: the sizes of its result but for the channels, which are second in images and volumes, else last.
std::vector<int64_t> rows_of(const LiveBlock& block) {
  std::vector<int64_t> shape = parse_shape(block.shape);
  if (shape.size() < 2) return {};
  const bool has_pixels = contains_one_of(block.made.op, {"conv", "batch_norm", "pool", "upsample"});
  shape.erase(has_pixels && shape.size() >= 3 ? shape.begin() + 1 : shape.end() - 1);
  return shape;
}

/// To write where all sequences are padded further than the longest needs.
std::vector<std::string> lines_for_short_sequences(const PaddedData& data) {
  return {
      "batch = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # in collate_fn: to the longest of the "
      "batch",
      fmt::format(R"(tokenizer(texts, padding="longest", truncation=True, max_length={})  # not padding="max_length")",
                  std::bit_ceil(static_cast<uint64_t>(data.longest)))};
}

/// `work` grows with `length`, to which these are padded.
Reason reason_of_padding(const PaddedData& data, int64_t length, const Share& work) {
  const double part = static_cast<double>(data.longest) / static_cast<double>(length);
  const bool none_is_full = part <= 0.75;
  const std::string what =
      none_is_full ? fmt::format("the longest of its sequences has {} of {} positions", data.longest, length)
                   : fmt::format("a few of its sequences are as long as {}", data.longest);
  const int64_t rest = none_is_full ? static_cast<int64_t>(part * 1000) : data.per_mille;
  return {.text = fmt::format("{}: {}, and layers compute all of it, {} so far", name_padding(data), what,
                              with_unit(work.bytes)),
          .bytes = work.bytes - work.bytes / 1000 * rest,
          .fix = "less_padding",
          .how = none_is_full ? lines_for_short_sequences(data) : lines_for_longest_sequences(data)};
}

/// Of one image or volume: half of each side but those that are short already.
std::vector<std::string> lines_for_patches(const std::vector<int64_t>& sizes) {
  constexpr int64_t kShort = 96;
  std::vector<int64_t> smaller(sizes.begin() + 1, sizes.end());
  for (int64_t& size : smaller) size = size > kShort ? size / 2 : size;
  const std::vector<int64_t> whole(sizes.begin() + 1, sizes.end());
  return {fmt::format(
              "# patches or crops of {} in place of {}, as the data are loaded: memory follows their number of places",
              fmt::join(smaller, " × "), fmt::join(whole, " × ")),
          "x = F.interpolate(x, scale_factor=0.5)  # or smaller as a whole, its mask, too"};
}

/// Of how many things a layer works on all pairs: two of the sizes that are equal, or one less, and not width and height. 0: it does not.
int64_t count_paired(const std::vector<int64_t>& sizes) {
  constexpr int64_t kMany = 64, kMore = 256;  // a batch may be as large as its sequences are long
  if (sizes.size() != 2 || sizes[0] < kMany) return 0;
  const bool are_all = sizes[0] == sizes[1] + 1 || (sizes[0] == sizes[1] && sizes[0] >= kMore);
  return are_all ? sizes[0] : 0;
}

}  // namespace

// Most of what layers compute is thrown away.
Found find_padding(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase == Phase::optimizer) return {};
  for (const PaddedData& data : facts.device.padded) {
    const std::vector<int64_t> sizes = parse_shape(data.shape);
    for (size_t i = 1; i < sizes.size(); ++i) {
      const Share work = sum_blocks(facts, [&](const LiveBlock& block) {
        const std::vector<int64_t> shape = is_data(block) ? parse_shape(block.shape) : std::vector<int64_t>();
        return std::ranges::any_of(shape, [&](int64_t size) {
          const bool is_of_all = sizes[i] > 0 && size % sizes[i] == 0 && size / sizes[i] == sizes[0];
          return size == sizes[i] || is_of_all;
        });
      });
      if (sizes[i] < std::max<int64_t>(1, data.longest) || !is_large(facts, work.bytes, 0.5)) continue;
      return reason_of_padding(data, sizes[i], work);
    }
  }
  return {};
}

// What is left to say of a step of training: how much it works on at once, and what each row takes.
Found find_many_rows(const ReasonFacts& facts) {
  constexpr double kWorth = 0.25;  // of the memory: most layers have other sizes
  constexpr int64_t kManyRows = 64;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase == Phase::optimizer || !builds_graph(facts).value_or(false)) return {};
  const auto is_saved = [&](const LiveBlock& block) {
    return block.category == Category::activation && block.step == facts.device.state.step &&
           !block.made.module.empty();
  };
  const Share saved = sum_blocks(facts, is_saved);
  if (!is_large(facts, saved.bytes, 0.5)) return {};
  std::map<std::vector<int64_t>, Share> alike;
  for (const LiveBlock& block : facts.device.state.blocks) {
    std::vector<int64_t> rows = is_saved(block) ? rows_of(block) : std::vector<int64_t>();
    if (!rows.empty()) alike[std::move(rows)].add(block);
  }
  const auto most = std::ranges::max_element(alike, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == alike.end() || !is_large(facts, most->second.bytes, kWorth)) return {};
  const auto& [sizes, work] = *most;
  int64_t rows = 1;
  for (const int64_t size : sizes) {
    if (size <= 0 || rows > saved.bytes / size) return {};  // no shape of what is there
    rows *= size;
  }
  if (rows < kManyRows) return {};
  const int64_t paired = count_paired(sizes);
  // So far: it may run backward without one.
  const bool has_backward = expects_backward(facts) || wants_gradient_of_data(facts);
  std::vector<std::string> how;
  if (paired > 0)
    how = {"near = torch.cdist(pos, pos) < cutoff  # pairs within a cutoff alone, as a list of indices",
           "# or the pairs of some rows after the other"};
  if (!has_backward) how.emplace_back("with torch.no_grad():  # around it, if nothing runs backward");
  const bool of_data_alone = has_backward && !expects_backward(facts);
  const bool is_of_one = sizes.size() >= 3 && sizes[0] == 1 && has_backward && !of_data_alone;
  if (is_of_one) how = lines_for_patches(sizes);
  if (of_data_alone) how.emplace_back(kGradientsOfParts);
  return Reason{.text = fmt::format(
                    "one forward pass works on {} {}{} at once, as '{}' does{}, and keeps {} for "
                    "backward{}: {} for each{}",
                    fmt::join(sizes, " × "), sizes.size() >= 3 ? "places" : "rows",
                    paired > 0 ? fmt::format(", all pairs of {},", paired) : "", work.made().module,
                    comma_shape(*work.largest), with_unit(saved.bytes),
                    runs_checkpoints(facts) ? "" : ", as nothing is checkpointed", with_unit(saved.bytes / rows),
                    has_backward ? "" : "; no optimizer is there, and without backward, torch.no_grad() keeps none"),
                .bytes = saved.bytes / (has_backward ? 2 : 1),
                .fix = !has_backward                                           ? "no_grad_in_evaluation"
                       : of_data_alone                                         ? "split_batch"
                       : is_of_one                                             ? "smaller_images"
                       : (sizes.size() == 1 && facts.batch <= 1) || paired > 0 ? "fewer_rows"
                                                                               : "",
                .how = std::move(how)};
}

Found find_full_matrices(const ReasonFacts& f) {
  const OutOfMemory& failure = *f.device.failure;
  if (failure.where.op != "aten::linalg_svd" || !is_large(f, failure.requested_bytes, kWorthNaming)) return {};
  const Share as_large = sum_blocks(f, [&](const LiveBlock& block) {
    return block.made.op != failure.where.op && block.requested_bytes == failure.requested_bytes;
  });
  if (as_large.count > 0) return {};  // what is decomposed is square itself
  const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(failure.requested_bytes) / 4));
  return Reason{.text = fmt::format("full_matrices=True, SVD's default, makes a square matrix of about {} × {} ({})",
                                    side, side, short_place(failure.where)),
                .bytes = failure.requested_bytes,
                .fix = "reduced_svd"};
}

// Shampoo and the like: a matrix of n × n for a weight of n rows, and its powers.
Found find_preconditioners(const ReasonFacts& f) {
  constexpr int64_t kLong = 1024, kTimesParameters = 4;
  const Share states = sum_category(f, Category::optimizer_state), parameters = sum_category(f, Category::parameter);
  const Share square = sum_blocks(f, [&](const LiveBlock& block) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    return block.category == Category::optimizer_state && shape.size() == 2 && shape[0] == shape[1] &&
           shape[0] >= kLong;
  });
  if (square.largest == nullptr || !is_large(f, square.bytes, 0.4)) return {};
  if (square.bytes < kTimesParameters * parameters.bytes) return {};
  const int64_t rows = parse_shape(square.largest->shape)[0];
  return Reason{
      .text = fmt::format("the optimizer keeps square matrices, of a weight with {} rows one of {} × {}{}: {} of "
                          "state for {} of parameters",
                          rows, rows, rows, at(square.made()), with_unit(states.bytes), with_unit(parameters.bytes)),
      .bytes = square.bytes,
      .fix = "no_preconditioner"};
}

Found find_float64(const ReasonFacts& f) {
  int64_t bytes = 0;
  for (const LiveBlock& block : f.device.state.blocks) bytes += block.shape.ends_with(" float64") ? block.bytes : 0;
  if (!is_large(f, bytes, 0.5)) return {};
  return Reason{.text = fmt::format("float64: {} are of double precision, twice as much as float32", with_unit(bytes)),
                .bytes = bytes,
                .fix = "float32"};
}

}  // namespace oomdiag
