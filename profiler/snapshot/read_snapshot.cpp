#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <unordered_map>

#include "profiler/error.h"
#include "profiler/event.h"
#include "profiler/snapshot/actions.h"
#include "profiler/snapshot/fields.h"
#include "profiler/snapshot/pickle.h"
#include "profiler/snapshot/places.h"
#include "profiler/snapshot/snapshot.h"
#include "profiler/trace/event_file.h"
#include "profiler/trace/event_log.h"
#include "profiler/trace/mix.h"
#include "profiler/trace/packed_events.h"

// From pickled dictionaries to a Snapshot. What each one is follows from its keys, in whatever order and with whatever
// other keys the torch of the day writes; millions of them are turned into structs as soon as they are complete:
//
//   frame     name, filename, line          block     size, state, …             (2.0 and before: history instead of frames)
//   entry     action, addr, size, stream, … segment   address, total_size, blocks, …
//
// The rest (the file's outermost dictionary, the allocator's settings) stays as it is.

namespace oomdiag {
namespace {

using Kind = PickleValue::Kind;

SnapshotBlock::State state_of(std::string_view name) {
  if (name == "active_allocated") return SnapshotBlock::State::allocated;
  return name.starts_with("active") ? SnapshotBlock::State::pending_free : SnapshotBlock::State::free;
}

class SnapshotReader {
 public:
  Snapshot read(const std::filesystem::path& path) {
    path_ = path.string();
    const InputFile file(path);
    Pickle pickle(
        [this](Pickle& from, Pickle::Items items) { return fold(from, items); },
        [this](Pickle&, Pickle::Items elements, std::optional<int64_t> list) { return absorb(elements, list); });
    const PickleValue top = pickle.read(file, path_);
    // Before 2.1 a snapshot was the bare list of segments.
    const PickleValue segments = pickle.find(top, "segments");
    const bool bare = top.is(Kind::list) && is_all(pickle, top, Record::segment);
    if (!segments.is(Kind::list) && !bare) {
      throw Error(ErrorKind::input, fmt::format("'{}' is a pickle, but no memory snapshot: it has no segments", path_),
                  "write one with torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")");
    }
    collect_host_blocks(pickle, pickle.find(top, "host_segments"));
    collect_segments(pickle, bare ? top : segments);
    collect_traces(pickle, pickle.find(top, "device_traces"));
    const PickleValue settings = pickle.find(top, "allocator_settings");
    snapshot_.allocator_settings = pickle.text(pickle.find(settings, "PYTORCH_CUDA_ALLOC_CONF"));
    collect_annotations(pickle, pickle.find(top, "external_annotations"));
    snapshot_.frees_are_requests = free_requests_ > 0 && free_completions_ == 0;
    snapshot_.places = std::move(places_).places();
    snapshot_.names = std::move(places_).names();
    return std::move(snapshot_);
  }

 private:
  enum class Record : uint8_t { frame, stack, entry, block, segment, trace };
  struct Frame {
    PickleValue name, filename;
    int64_t line = 0;
    PickleValue original;

    bool operator==(const Frame&) const = default;
  };
  /// Of two stacks of one file that differ it differs too: 128 bits.
  struct StackHash {
    uint64_t low = 0, high = 0;
    bool operator==(const StackHash&) const = default;
  };
  struct TakeLow {
    size_t operator()(const StackHash& hash) const { return hash.low; }
  };
  /// Where the entries of a GPU's history lie among all.
  struct TraceRuns {
    std::vector<EventRun> runs;
    uint64_t size = 0;
  };

  static int64_t record(Record kind, size_t index) {
    return static_cast<int64_t>(index << 3 | static_cast<size_t>(kind));
  }
  static bool is_record(PickleValue value, Record kind) {
    return value.is(Kind::record) && (value.index() & 7) == static_cast<size_t>(kind);
  }
  static size_t index_of(PickleValue record) { return record.index() >> 3; }

  std::optional<int64_t> fold(Pickle& pickle, Pickle::Items items) {
    fields_.read(pickle, items);
    const Fields& fields = fields_;
    if (fields.has(SnapshotField::action) && fields.has(SnapshotField::size)) {
      entries_.add(make_entry(pickle, fields));
      return record(Record::entry, entries_.size() - 1);
    }
    if (fields.has(SnapshotField::filename) && fields.has(SnapshotField::line)) {
      return record(Record::frame,
                    frame_of({fields[SnapshotField::name], fields[SnapshotField::filename],
                              fields.number(SnapshotField::line), fields[SnapshotField::fx_original_trace]}));
    }
    if (fields.has(SnapshotField::total_size) && fields.has(SnapshotField::blocks)) {
      snapshot_.segments.push_back(make_segment(pickle, fields));
      return record(Record::segment, snapshot_.segments.size() - 1);
    }
    if (fields.has(SnapshotField::size) && fields.has(SnapshotField::state)) {
      blocks_.push_back(make_block(pickle, fields));
      return record(Record::block, blocks_.size() - 1);
    }
    // An element of a block's history in old files: its frames are those of the block.
    if (fields.has(SnapshotField::real_size))
      return record(Record::stack, find_place(pickle, fields[SnapshotField::frames]));
    return std::nullopt;
  }

  Event make_entry(Pickle& pickle, const Fields& fields) {
    const bool has_free = fields.has(SnapshotField::device_free);
    const EventKind kind = find_kind(pickle, fields[SnapshotField::action]);
    free_requests_ += kind == EventKind::free_requested ? 1 : 0;
    free_completions_ += kind == EventKind::free_completed ? 1 : 0;
    uint32_t place = find_place(pickle, fields[SnapshotField::frames]);
    const std::string_view part = pickle.text(fields[SnapshotField::user_metadata]);
    if (!part.empty() && kind == EventKind::alloc) place = places_.within(place, part);
    return {.time = static_cast<uint64_t>(fields.number(SnapshotField::time_us)),
            .address = fields.address(has_free ? SnapshotField::device_free : SnapshotField::addr),
            .bytes = fields.number(SnapshotField::size),
            .detail = fields.address(SnapshotField::stream),
            .context = place,
            .kind = kind};
  }

  // There are ten words for millions of entries.
  EventKind find_kind(const Pickle& pickle, PickleValue word) {
    if (!word.is(Kind::text)) return EventKind::none;
    if (word.index() >= kinds_.size()) kinds_.resize(word.index() + 1);
    std::optional<EventKind>& known = kinds_[word.index()];
    if (!known) known = kind_of_action(pickle.text(word));
    return *known;
  }

  // Writers share frames; of a file that repeats them each is kept once.
  size_t frame_of(const Frame& frame) {
    uint64_t hash = mix(frame.name.bits(), frame.filename.bits());
    hash = mix(hash, static_cast<uint64_t>(frame.line));
    const auto [begin, end] = frame_index_.equal_range(hash);
    for (auto at = begin; at != end; ++at) {
      if (frames_[at->second] == frame) return at->second;
    }
    frames_.push_back(frame);
    frame_index_.emplace(hash, frames_.size() - 1);
    return frames_.size() - 1;
  }

  static bool any_entry(Pickle::Items elements) {
    if (is_record(elements.front(), Record::frame)) return false;  // by far the most lists are stacks
    return std::ranges::any_of(elements, [](PickleValue value) { return is_record(value, Record::entry); });
  }

  // A list of entries is a GPU's history. Each of them stands in one, in the order in which they were read.
  std::optional<int64_t> absorb(Pickle::Items elements, std::optional<int64_t> list) {
    const PickleValue known(Kind::record, list.value_or(0));
    if (list ? !is_record(known, Record::trace) : !any_entry(elements)) return std::nullopt;
    const size_t index = list ? index_of(known) : traces_.size();
    if (!list) traces_.emplace_back();
    TraceRuns& trace = traces_[index];
    for (const PickleValue element : elements) {
      if (!is_record(element, Record::entry)) continue;
      const size_t entry = index_of(element);
      if (entry < listed_entries_) reject_copies();
      const bool follows =
          !trace.runs.empty() && trace.runs.back().slot + (trace.size - trace.runs.back().first) == entry;
      if (!follows) trace.runs.push_back({static_cast<uint32_t>(trace.size), static_cast<uint32_t>(entry)});
      listed_entries_ = entry + 1;
      ++trace.size;
    }
    return record(Record::trace, index);
  }

  SnapshotBlock make_block(Pickle& pickle, const Fields& fields) {
    const int64_t requested =
        fields.has(SnapshotField::requested_size) ? fields.number(SnapshotField::requested_size) : 0;
    return {.address = fields.address(SnapshotField::address),
            .bytes = fields.number(SnapshotField::size),
            .requested_bytes = requested > 0 ? requested : fields.number(SnapshotField::size),
            .place = find_place(
                pickle, fields[fields.has(SnapshotField::history) ? SnapshotField::history : SnapshotField::frames]),
            .state = state_of(pickle.text(fields[SnapshotField::state]))};
  }

  // What is listed is taken: a list that several segments share is that of the first.
  SnapshotSegment make_segment(Pickle& pickle, const Fields& fields) {
    SnapshotSegment segment{
        .address = fields.address(SnapshotField::address),
        .bytes = fields.number(SnapshotField::total_size),
        .stream = fields.address(SnapshotField::stream),
        .device = static_cast<int>(std::clamp<int64_t>(fields.number(SnapshotField::device), 0, 255)),
        .large = pickle.text(fields[SnapshotField::segment_type]) != "small",
        .expandable = fields[SnapshotField::is_expandable].number() != 0};
    uint64_t address = segment.address;
    const PickleValue list = pickle.resolve(fields[SnapshotField::blocks]);
    for (const PickleValue value : pickle.elements(list)) {
      const PickleValue one = pickle.resolve(value);
      if (!is_record(one, Record::block) || index_of(one) >= blocks_.size()) continue;
      if (segment.blocks.size() == blocks_.size()) reject_copies();
      SnapshotBlock block = blocks_[index_of(one)];
      if (block.address == 0) block.address = address;  // old files leave it to the reader to add up
      address = block.address + static_cast<uint64_t>(std::max<int64_t>(block.bytes, 0));
      segment.blocks.push_back(block);
    }
    if (list.is(Kind::list) && !pickle.elements(list).empty()) pickle.replace_list(list, record(Record::stack, 0));
    blocks_.clear();
    return segment;
  }

  // Every event has a stack of its own, of shared frames; there are few that differ.
  uint32_t find_place(Pickle& pickle, PickleValue frames) {
    const PickleValue stack = pickle.resolve(frames);
    if (is_record(stack, Record::stack)) return static_cast<uint32_t>(index_of(stack));
    if (!stack.is(Kind::list)) return 0;
    uint64_t low = 0, high = 0;  // two, as a stack that is taken for another one gives a wrong line
    for (const PickleValue element : pickle.elements(stack)) {
      low = spread(low ^ element.bits());
      high = (std::rotl(high, 23) + element.bits()) * 0xc2b2ae3d27d4eb4f;
    }
    low ^= high >> 32;
    if (known_stacks_.size() > kMaxStacks) known_stacks_.clear();
    const auto [known, fresh] = known_stacks_.try_emplace(StackHash{low, high}, 0);
    if (fresh) known->second = read_stack(pickle, pickle.elements(stack));
    const uint32_t place = known->second;
    pickle.replace_list(stack, record(Record::stack, place));
    return place;
  }

  uint32_t read_stack(const Pickle& pickle, Pickle::Items elements) {
    uint32_t of_history = 0;
    for (const PickleValue value : elements) {
      const PickleValue element = pickle.resolve(value);
      if (is_record(element, Record::stack)) of_history = static_cast<uint32_t>(index_of(element));
      if (!is_record(element, Record::frame)) continue;
      const Frame& frame = frames_[index_of(element)];
      places_.see({pickle.text(frame.name), pickle.text(frame.filename), frame.line, pickle.text(frame.original)});
    }
    const uint32_t own = places_.finish();
    return of_history != 0 ? of_history : own;
  }

  void collect_annotations(const Pickle& pickle, PickleValue list) {
    for (const PickleValue value : pickle.elements(list)) {
      const PickleValue name = pickle.find(value, "name"), time = pickle.find(value, "time_us");
      if (!name.is(Kind::text) || !time.is(Kind::integer)) continue;
      snapshot_.annotations.push_back({.name = places_.name(pickle.text(name)),
                                       .time_us = time.number(),
                                       .ends = pickle.text(pickle.find(value, "stage")) == "END"});
    }
    std::ranges::stable_sort(snapshot_.annotations, {}, &SnapshotAnnotation::time_us);
  }

  bool is_all(const Pickle& pickle, PickleValue list, Record kind) const {
    const auto elements = pickle.elements(list);
    return !elements.empty() && std::all_of(elements.begin(), elements.end(),
                                            [&](PickleValue value) { return is_record(pickle.resolve(value), kind); });
  }

  // Of pinned host memory the cache keeps every block that it ever got: each is a segment of one.
  void collect_host_blocks(const Pickle& pickle, PickleValue list) {
    for (const PickleValue value : pickle.elements(list)) {
      const PickleValue segment = pickle.resolve(value);
      if (!is_record(segment, Record::segment) || snapshot_.host_blocks.size() == snapshot_.segments.size()) continue;
      const SnapshotSegment& one = snapshot_.segments[index_of(segment)];
      snapshot_.host_blocks.push_back({.address = one.address,
                                       .bytes = one.bytes,
                                       .requested_bytes = one.bytes,
                                       .place = one.blocks.empty() ? 0 : one.blocks.front().place});
    }
  }

  void collect_segments(const Pickle& pickle, PickleValue list) {
    std::vector<SnapshotSegment> segments;
    for (const PickleValue value : pickle.elements(list)) {
      const PickleValue segment = pickle.resolve(value);
      if (!is_record(segment, Record::segment)) continue;
      if (segments.size() == snapshot_.segments.size()) reject_copies();
      segments.push_back(std::move(snapshot_.segments[index_of(segment)]));
    }
    std::stable_sort(segments.begin(), segments.end(), [](const SnapshotSegment& a, const SnapshotSegment& b) {
      return a.device != b.device ? a.device < b.device : a.address < b.address;
    });
    snapshot_.segments = std::move(segments);
  }

  void collect_traces(const Pickle& pickle, PickleValue devices) {
    const auto packed = entries_.finish();
    for (const PickleValue value : pickle.elements(devices)) {
      if (snapshot_.traces.size() == kMaxTraces) break;
      EventLog& log = snapshot_.traces.emplace_back();
      const PickleValue trace = pickle.resolve(value);
      if (!is_record(trace, Record::trace)) continue;
      TraceRuns& one = traces_[index_of(trace)];
      if (one.runs.empty()) reject_copies();
      log = EventLog(EventFile(packed), std::move(one.runs), one.size);
      one = {};
    }
  }

  [[noreturn]] void reject_copies() const {
    throw Error(ErrorKind::input,
                fmt::format("'{}' is no memory snapshot: it lists the same entry several times", path_),
                "write one with torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")");
  }

  static constexpr size_t kMaxStacks = 1 << 18;
  static constexpr size_t kMaxTraces = 256;  // one for each device

  std::string path_;
  Snapshot snapshot_;
  PlaceFinder places_;
  std::vector<std::optional<EventKind>> kinds_;  ///< by text
  Fields fields_;
  std::vector<Frame> frames_;
  std::unordered_multimap<uint64_t, size_t> frame_index_;          ///< by hash
  std::unordered_map<StackHash, uint32_t, TakeLow> known_stacks_;  ///< the place of each, but for those of long ago
  EventPacker entries_;
  uint64_t free_requests_ = 0, free_completions_ = 0;
  uint64_t listed_entries_ = 0;        ///< those before are in a trace, or never will be
  std::vector<TraceRuns> traces_;      ///< as they were read
  std::vector<SnapshotBlock> blocks_;  ///< of the segment that is being read
};

}  // namespace

Snapshot read_snapshot(const std::filesystem::path& file) { return SnapshotReader().read(file); }

}  // namespace oomdiag
