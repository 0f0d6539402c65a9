#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "profiler/error.h"
#include "profiler/snapshot/fields.h"
#include "profiler/snapshot/pickle.h"
#include "profiler/snapshot/places.h"
#include "profiler/snapshot/snapshot.h"

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

SnapshotEntry::Action action_of(std::string_view name) {
  using Action = SnapshotEntry::Action;
  constexpr std::array<std::pair<std::string_view, Action>, 9> kActions = {{{"alloc", Action::alloc},
                                                                            {"free_requested", Action::free_requested},
                                                                            {"free_completed", Action::free_completed},
                                                                            {"free", Action::free_completed},
                                                                            {"segment_alloc", Action::segment_alloc},
                                                                            {"segment_free", Action::segment_free},
                                                                            {"segment_map", Action::segment_map},
                                                                            {"segment_unmap", Action::segment_unmap},
                                                                            {"oom", Action::oom}}};
  for (const auto& [text, action] : kActions) {
    if (text == name) return action;
  }
  return Action::other;
}

SnapshotBlock::State state_of(std::string_view name) {
  if (name == "active_allocated") return SnapshotBlock::State::allocated;
  return name.starts_with("active") ? SnapshotBlock::State::pending_free : SnapshotBlock::State::free;
}

class SnapshotReader {
 public:
  Snapshot read(const std::filesystem::path& path) {
    path_ = path.string();
    const InputFile file(path);
    entries_.reserve(
        std::min(file.bytes() / kBytesPerEntry, kMostReserved));  // to grow step by step would touch twice as much
    Pickle pickle([this](Pickle& from, Pickle::Items items) { return fold(from, items); });
    const PickleValue top = pickle.read(file, path_);
    // Before 2.1 a snapshot was the bare list of segments.
    const PickleValue segments = pickle.find(top, "segments");
    const bool bare = top.is(Kind::list) && is_all(pickle, top, Record::segment);
    if (!segments.is(Kind::list) && !bare) {
      throw Error(ErrorKind::input, fmt::format("'{}' is a pickle, but no memory snapshot: it has no segments", path_),
                  "write one with torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")");
    }
    collect_segments(pickle, bare ? top : segments);
    collect_traces(pickle, pickle.find(top, "device_traces"));
    const PickleValue settings = pickle.find(top, "allocator_settings");
    snapshot_.allocator_settings = pickle.text(pickle.find(settings, "PYTORCH_CUDA_ALLOC_CONF"));
    collect_annotations(pickle, pickle.find(top, "external_annotations"));
    snapshot_.places = std::move(places_).places();
    snapshot_.names = std::move(places_).names();
    return std::move(snapshot_);
  }

 private:
  enum class Record : uint8_t { frame, stack, entry, block, segment };
  struct Frame {
    PickleValue name, filename;
    int64_t line = 0;
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
    if (fields.has(Field::action) && fields.has(Field::size)) {
      entries_.push_back(make_entry(pickle, fields));
      return record(Record::entry, entries_.size() - 1);
    }
    if (fields.has(Field::filename) && fields.has(Field::line)) {
      frames_.push_back({fields[Field::name], fields[Field::filename], fields.number(Field::line)});
      return record(Record::frame, frames_.size() - 1);
    }
    if (fields.has(Field::total_size) && fields.has(Field::blocks)) {
      snapshot_.segments.push_back(make_segment(pickle, fields));
      return record(Record::segment, snapshot_.segments.size() - 1);
    }
    if (fields.has(Field::size) && fields.has(Field::state)) {
      blocks_.push_back(make_block(pickle, fields));
      return record(Record::block, blocks_.size() - 1);
    }
    // An element of a block's history in old files: its frames are those of the block.
    if (fields.has(Field::real_size)) return record(Record::stack, find_place(pickle, fields[Field::frames]));
    return std::nullopt;
  }

  SnapshotEntry make_entry(Pickle& pickle, const Fields& fields) {
    const bool has_free = fields.has(Field::device_free);
    return {.address = fields.address(has_free ? Field::device_free : Field::addr),
            .bytes = fields.number(Field::size),
            .stream = fields.address(Field::stream),
            .time_us = fields.number(Field::time_us),
            .place = find_place(pickle, fields[Field::frames]),
            .action = find_action(pickle, fields[Field::action])};
  }

  // There are ten words for millions of entries.
  SnapshotEntry::Action find_action(const Pickle& pickle, PickleValue word) {
    if (!word.is(Kind::text)) return SnapshotEntry::Action::other;
    if (word.index() >= actions_.size()) actions_.resize(word.index() + 1);
    std::optional<SnapshotEntry::Action>& known = actions_[word.index()];
    if (!known) known = action_of(pickle.text(word));
    return *known;
  }

  SnapshotBlock make_block(Pickle& pickle, const Fields& fields) {
    const int64_t requested = fields.has(Field::requested_size) ? fields.number(Field::requested_size) : 0;
    return {.address = fields.address(Field::address),
            .bytes = fields.number(Field::size),
            .requested_bytes = requested > 0 ? requested : fields.number(Field::size),
            .place = find_place(pickle, fields[fields.has(Field::history) ? Field::history : Field::frames]),
            .state = state_of(pickle.text(fields[Field::state]))};
  }

  // What is listed is taken: a list that several segments share is that of the first.
  SnapshotSegment make_segment(Pickle& pickle, const Fields& fields) {
    SnapshotSegment segment{.address = fields.address(Field::address),
                            .bytes = fields.number(Field::total_size),
                            .stream = fields.address(Field::stream),
                            .device = static_cast<int>(std::clamp<int64_t>(fields.number(Field::device), 0, 255)),
                            .large = pickle.text(fields[Field::segment_type]) != "small",
                            .expandable = fields[Field::is_expandable].number() != 0};
    uint64_t address = segment.address;
    const PickleValue list = pickle.resolve(fields[Field::blocks]);
    for (const PickleValue value : pickle.elements(list)) {
      const PickleValue one = pickle.resolve(value);
      if (!is_record(one, Record::block) || index_of(one) >= blocks_.size()) continue;
      if (segment.blocks.size() == blocks_.size()) refuse_copies();
      SnapshotBlock block = blocks_[index_of(one)];
      if (block.address == 0) block.address = address;  // old files leave it to the reader to add up
      address = block.address + static_cast<uint64_t>(std::max<int64_t>(block.bytes, 0));
      segment.blocks.push_back(block);
    }
    if (list.is(Kind::list) && !pickle.elements(list).empty()) pickle.replace_list(list, record(Record::stack, 0));
    blocks_.clear();
    return segment;
  }

  // Stacks are shared: each list of frames is looked at once.
  uint32_t find_place(Pickle& pickle, PickleValue frames) {
    const PickleValue stack = pickle.resolve(frames);
    if (is_record(stack, Record::stack)) return static_cast<uint32_t>(index_of(stack));
    if (!stack.is(Kind::list)) return 0;
    uint32_t of_history = 0;
    for (const PickleValue value : pickle.elements(stack)) {
      const PickleValue element = pickle.resolve(value);
      if (is_record(element, Record::stack)) of_history = static_cast<uint32_t>(index_of(element));
      if (!is_record(element, Record::frame)) continue;
      const Frame& frame = frames_[index_of(element)];
      places_.see({pickle.text(frame.name), pickle.text(frame.filename), frame.line});
    }
    const uint32_t own = places_.finish();
    const uint32_t place = of_history != 0 ? of_history : own;
    if (!pickle.elements(stack).empty()) pickle.replace_list(stack, record(Record::stack, place));
    return place;
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

  void collect_segments(const Pickle& pickle, PickleValue list) {
    std::vector<SnapshotSegment> segments;
    for (const PickleValue value : pickle.elements(list)) {
      const PickleValue segment = pickle.resolve(value);
      if (!is_record(segment, Record::segment)) continue;
      if (segments.size() == snapshot_.segments.size()) refuse_copies();
      segments.push_back(std::move(snapshot_.segments[index_of(segment)]));
    }
    std::stable_sort(segments.begin(), segments.end(), [](const SnapshotSegment& a, const SnapshotSegment& b) {
      return a.device != b.device ? a.device < b.device : a.address < b.address;
    });
    snapshot_.segments = std::move(segments);
  }

  // The usual case: one card was used, and its entries are all there are, in order.
  bool are_all_entries(const Pickle& pickle, PickleValue trace) const {
    const auto elements = pickle.elements(trace);
    if (elements.size() != entries_.size()) return false;
    for (size_t i = 0; i < elements.size(); ++i) {
      const PickleValue entry = pickle.resolve(elements[i]);
      if (!is_record(entry, Record::entry) || index_of(entry) != i) return false;
    }
    return true;
  }

  void collect_traces(const Pickle& pickle, PickleValue devices) {
    size_t left = entries_.size();  // each entry stands in one trace
    for (const PickleValue trace : pickle.elements(devices)) {
      if (snapshot_.traces.size() == kMostTraces) break;
      auto& entries = snapshot_.traces.emplace_back();
      if (left > 0 && are_all_entries(pickle, trace)) {
        entries = std::move(entries_);
        entries_.clear();
        left = 0;
        continue;
      }
      for (const PickleValue value : pickle.elements(trace)) {
        const PickleValue entry = pickle.resolve(value);
        if (!is_record(entry, Record::entry)) continue;
        if (left-- == 0) refuse_copies();
        entries.push_back(entries_[index_of(entry)]);
      }
    }
    entries_.clear();
  }

  [[noreturn]] void refuse_copies() const {
    throw Error(ErrorKind::input,
                fmt::format("'{}' is no memory snapshot: it lists the same entry several times", path_),
                "write one with torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")");
  }

  static constexpr uint64_t kBytesPerEntry = 50;  // as Python writes them, the keys from the memo
  static constexpr uint64_t kMostReserved = 1 << 24;
  static constexpr size_t kMostTraces = 256;  // one for each device

  std::string path_;
  Snapshot snapshot_;
  PlaceFinder places_;
  std::vector<std::optional<SnapshotEntry::Action>> actions_;  ///< by text
  Fields fields_;
  std::vector<Frame> frames_;
  std::vector<SnapshotEntry> entries_;
  std::vector<SnapshotBlock> blocks_;  ///< of the segment that is being read
};

}  // namespace

Snapshot read_snapshot(const std::filesystem::path& file) { return SnapshotReader().read(file); }

}  // namespace oomdiag
