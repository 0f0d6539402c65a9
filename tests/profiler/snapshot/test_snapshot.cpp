#include <algorithm>
#include <chrono>
#include <fstream>
#include <random>

#include "profiler/error.h"
#include "profiler/report/make/make_report.h"
#include "profiler/report/text/text.h"
#include "profiler/snapshot/snapshot.h"
#include "profiler/snapshot/to_trace.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"
#include "tests/event_builder.h"
#include "tests/profiler/snapshot/snapshot_writer.h"

using namespace oomdiag;

namespace {

Snapshot read(const std::string& bytes) {
  const TestFolder folder;
  return read_snapshot(folder.write("snapshot.pickle", bytes));
}

std::string message_of(const std::string& bytes) {
  try {
    read(bytes);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::input);
    return error.what();
  }
  return "no error";
}

/// 20 MiB reserved: 8 in use by train.py:31, then an OOM of 1 GiB.
std::string out_of_memory() {
  return snapshot(
      {segment(kAddress, 20_MiB,
               {block(8_MiB, 8_MiB - 100, "active_allocated", stack()), block(12_MiB, 0, "inactive")})},
      {entry("segment_alloc", kAddress, 20_MiB), entry("alloc", kAddress, 8_MiB - 100, stack()),
       entry("alloc", kAddress + 8_MiB, 2_MiB), entry("free_requested", kAddress + 8_MiB, 2_MiB),
       entry("free_completed", kAddress + 8_MiB, 2_MiB), entry("oom", 5_MiB, 1_GiB, stack()), entry("snapshot", 0, 0)});
}

}  // namespace

TEST_CASE("a snapshot is read: segments, blocks, entries, and the user's line of each", "[snapshot]") {
  const Snapshot found = read(out_of_memory());
  REQUIRE(found.segments.size() == 1);
  REQUIRE(found.segments[0].blocks.size() == 2);
  const SnapshotBlock& first = found.segments[0].blocks[0];
  CHECK(first.requested_bytes == 8_MiB - 100);
  CHECK(first.state == SnapshotBlock::State::allocated);
  CHECK(found.names[found.places[first.place].source] == "/home/me/train.py:31");
  CHECK(found.segments[0].blocks[1].address == kAddress + 8_MiB);
  REQUIRE(found.traces.size() == 1);
  REQUIRE(found.traces[0].size() == 7);
  CHECK(found.traces[0][1].kind == EventKind::alloc);
  CHECK(found.traces[0][5].kind == EventKind::out_of_memory);
  CHECK(found.traces[0][5].address == 5_MiB);
  CHECK(found.traces[0][6].kind == EventKind::none);
  CHECK(found.allocator_settings == "max_split_size_mb:64");
}

TEST_CASE("a snapshot becomes a report: the OOM, the peak and who holds what", "[snapshot]") {
  const Trace trace = to_trace(read(out_of_memory()));
  const Report report = make_report(trace, {});
  CHECK(report.outcome == "out_of_memory");
  REQUIRE(report.devices.size() == 1);
  const ReportOfDevice& gpu = report.devices[0];
  REQUIRE(gpu.failure.has_value());
  CHECK(gpu.failure->requested_bytes == 1_GiB);
  CHECK(gpu.failure->source == "/home/me/train.py:31");
  CHECK(gpu.failure->allocated_bytes == 8_MiB);
  CHECK(gpu.failure->reserved_bytes == 20_MiB);
  CHECK(gpu.peak.allocated_bytes == 10_MiB);
  CHECK(gpu.replay_error_bytes == 0);
  CHECK(gpu.device.total_bytes == 25_MiB);
  REQUIRE(gpu.allocations.size() == 1);
  CHECK(gpu.allocations[0].name == "/home/me/train.py:31");
  CHECK(gpu.allocations[0].category == Category::unknown);
  const std::string words = to_text(report, {});
  CHECK(words.find("out of memory, by a memory snapshot") != words.npos);
  CHECK(words.find("train.py:31") != words.npos);
}

TEST_CASE("where the history begins in the middle, the state before it is worked out", "[snapshot]") {
  const int64_t other = kAddress + 64_MiB;
  const Snapshot cut = read(
      snapshot({segment(kAddress, 20_MiB, {block(8_MiB, 8_MiB, "active_allocated"), block(12_MiB, 0, "inactive")})},
               {entry("alloc", kAddress + 8_MiB, 2_MiB), entry("free_requested", other + 3_MiB, 4_MiB),
                entry("free_completed", other + 3_MiB, 4_MiB), entry("segment_free", other, 20_MiB),
                entry("free_requested", kAddress + 8_MiB, 2_MiB), entry("free_completed", kAddress + 8_MiB, 2_MiB)}));
  const Report report = make_report(to_trace(cut), {});
  REQUIRE(report.devices.size() == 1);
  CHECK(report.devices[0].peak.allocated_bytes == 14_MiB);
  CHECK(report.devices[0].peak.reserved_bytes == 40_MiB);
  CHECK(report.devices[0].replay_error_bytes == 0);
}

TEST_CASE("a snapshot without a history shows its segments and blocks as they are", "[snapshot]") {
  const Report report = make_report(
      to_trace(read(snapshot({segment(kAddress, 20_MiB,
                                      {block(8_MiB, 8_MiB, "active_allocated", stack()),
                                       block(2_MiB, 1, "active_pending_free"), block(10_MiB, 0, "inactive")})},
                             {}))),
      {});
  REQUIRE(report.devices.size() == 1);
  CHECK(report.outcome == "ok");
  CHECK(report.devices[0].memory.allocated_bytes == 8_MiB);
  CHECK(report.devices[0].memory.pending_free_bytes == 2_MiB);
  CHECK(report.devices[0].memory.cached_bytes == 10_MiB);
}

TEST_CASE("snapshots of every vintage are read alike", "[snapshot]") {
  SECTION("2.0: the bare list of segments, frames inside of a history, no addresses of blocks") {
    const std::string history =
        list({dict({{"addr", integer(kAddress)}, {"real_size", integer(8_MiB)}, {"frames", stack()}})});
    const Snapshot found = read(PickleWriter()
                                    .list({dict({{"device", integer(0)},
                                                 {"address", integer(kAddress)},
                                                 {"total_size", integer(20_MiB)},
                                                 {"segment_type", text("large")},
                                                 {"blocks", list({dict({{"size", integer(8_MiB)},
                                                                        {"state", text("active_allocated")},
                                                                        {"history", history}})})}})})
                                    .stop());
    REQUIRE(found.segments.size() == 1);
    const SnapshotBlock& only = found.segments[0].blocks.at(0);
    CHECK(found.names[found.places[only.place].source] == "/home/me/train.py:31");
    CHECK(only.requested_bytes == 8_MiB);
  }
  SECTION("the documentation's word for a pending free, and unknown keys and actions") {
    const Snapshot found =
        read(snapshot({segment(kAddress, 2_MiB, {block(2_MiB, 1, "active_awaiting_free")})},
                      {dict({{"action", text("annotate")}, {"size", integer(1)}, {"novelty", list({integer(1)})}})}));
    CHECK(found.segments[0].blocks[0].state == SnapshotBlock::State::pending_free);
    CHECK(found.traces[0][0].kind == EventKind::none);
  }
  SECTION("frames of C++ name the operator and the node") {
    const std::string cpp = list({frame("c10::cuda::CUDACachingAllocator::malloc(unsigned long)", "??", 0),
                                  frame("at::_ops::empty_like::call(at::Tensor const&)", "??", 0),
                                  frame("torch::autograd::generated::ReluBackward0::apply(std::vector<>&&)", "??", 0),
                                  frame("torch::autograd::Engine::thread_main()", "??", 0)});
    const Snapshot found = read(snapshot({}, {entry("alloc", kAddress, 512, cpp)}));
    const SnapshotPlace& place = found.places[found.traces[0][0].context];
    CHECK(found.names[place.op] == "aten::empty_like");
    CHECK(found.names[place.node] == "ReluBackward0");
    CHECK(place.source == 0);
  }
}

TEST_CASE("what is shared by the memo is shared, whatever the opcode", "[snapshot][pickle]") {
  // protocol 2 with BINPUT and BINGET, as libtorch writes it, and protocol 4 with MEMOIZE
  for (const auto& [put, get] : {std::pair<std::string, std::string>{"q\x05", "h\x05"}, {"r\x05", "j\x05"}}) {
    const std::string zeros = put[0] == 'r' ? std::string(3, '\0') : "";
    const std::string shared = stack() + put + zeros;
    const Snapshot found =
        read(snapshot({}, {entry("alloc", kAddress, 512, shared), entry("alloc", kAddress + 512, 512, get + zeros)}));
    REQUIRE(found.traces.at(0).size() == 2);
    CHECK(found.traces[0][0].context == found.traces[0][1].context);
    CHECK(found.traces[0][0].context != 0);
  }
}

TEST_CASE("a pickle that would run code is rejected with one line that says so", "[snapshot][pickle]") {
  const std::string harm =
      "\x80\x04"
      "cos\nsystem\nX\x04\0\0\0true\x85R.";
  CHECK(message_of("\x80\x04"
                   "cos\nsystem\n(X.")
            .find("it wants to run code (GLOBAL at byte 2)") != std::string::npos);
  CHECK(message_of("\x80\x04\x8c\x02os\x8c\x06system\x93.").find("GLOBAL at byte 14") != std::string::npos);
  CHECK(message_of(harm).find("run code") != std::string::npos);
  CHECK(message_of("\x80\x02K\x01R.").find("REDUCE") != std::string::npos);
  CHECK(message_of("\x80\x02K\x01"
                   "b.")
            .find("BUILD") != std::string::npos);
}

TEST_CASE("a pickle that lists one entry, block or segment many times is rejected", "[snapshot][pickle]") {
  const std::string recall("h\0", 2);
  const auto many = [&](const std::string& one) {
    std::string text = "](" + one + "\x94";
    for (int i = 0; i < 3000; ++i) text += recall;
    return text + "e";
  };
  const auto with = [](const std::string& segments, const std::string& traces) {
    return PickleWriter().dict({{"segments", segments}, {"device_traces", traces}}).stop();
  };
  const std::string one_entry = entry("alloc", kAddress, 1_MiB);
  // A list of 3001 references to one list of 3001 references to one entry: 9 million of 48 bytes in 12 KB.
  const std::string entries = many(one_entry);
  std::string traces = "](" + entries + "\x94";
  for (int i = 0; i < 3000; ++i) traces += std::string("h\1", 2);
  CHECK(message_of(with(list({}), traces + "e")).find("several times") != std::string::npos);
  CHECK(message_of(with(list({}), list({entries}))).find("several times") != std::string::npos);

  const std::string blocks = many(block(1_MiB, 1_MiB, "active_allocated"));
  const std::string one_segment =
      dict({{"address", integer(kAddress)}, {"total_size", integer(2_MiB)}, {"blocks", blocks}});
  CHECK(message_of(with(list({one_segment}), list({}))).find("several times") != std::string::npos);
  CHECK(message_of(with(many(segment(kAddress, 2_MiB, {})), list({}))).find("several times") != std::string::npos);
}

TEST_CASE("a pickle of 0.8 MB that asks for terabytes is rejected within a second", "[snapshot][pickle]") {
  // `outer` references to a list of `inner` references to one thing. The memo counts from 0, lists come before what is in them.
  const auto square = [](const std::string& thing, int inner, int outer) {
    std::string text = "]\x94(]\x94(" + thing + "r" + std::string("\xff\0\0\0", 4);
    for (int i = 0; i < inner; ++i) text += std::string("j\xff\0\0\0", 5);
    text += "e";
    for (int i = 0; i < outer; ++i) text += std::string("j\1\0\0\0", 5);
    return text + "e";
  };
  const auto gap = [] {  // so that place 255 of the memo can be taken
    std::string text;
    for (int i = 0; i < 256; ++i) text += std::string("Nr") + static_cast<char>(i) + std::string("\0\0\0", 3) + "0";
    return text;
  };
  const int n = 80'000;
  const std::string one_entry = entry("alloc", kAddress, 1_MiB, stack());
  const std::string one_block = block(1_MiB, 1_MiB, "active_allocated");
  const std::string one_frame = frame("f", "x.py", 1);
  const auto with = [&](const std::string& segments, const std::string& traces) {
    const std::string whole = PickleWriter().dict({{"segments", segments}, {"device_traces", traces}}).stop();
    return whole.substr(0, 2) + gap() + whole.substr(2);
  };
  const std::vector<std::string> bombs = {
      with(list({}), square(one_entry, n, n)),  // 6.4 ∙ 10⁹ entries of 48 bytes
      with(list({dict({{"total_size", integer(1)}, {"blocks", square(one_block, n, n)}})}), list({})),
      with(square(segment(kAddress, 2_MiB, {}), n, n), list({})),
      with(list({}), list({list({entry("alloc", kAddress, 1_MiB, square(one_frame, n, n))})}))};
  for (const std::string& bomb : bombs) {
    CHECK(bomb.size() > 780'000);
    const auto begin = std::chrono::steady_clock::now();
    try {
      const Trace trace = to_trace(read(bomb));
      CHECK(trace.events.size() < 100);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::input);
    }
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(1));
  }
}

TEST_CASE("segments that overlap and blocks that lie outside are said", "[snapshot]") {
  const auto said = [](const std::vector<std::string>& segments) {
    const Trace trace = to_trace(read(snapshot(segments, {entry("alloc", kAddress, 512)})));
    return to_text(make_report(trace, {}), {.all = true}).find("overlap") != std::string::npos;
  };
  const std::string used = block(2_MiB, 2_MiB, "active_allocated");
  CHECK_FALSE(said({segment(kAddress, 2_MiB, {used}), segment(kAddress + 2_MiB, 2_MiB, {used})}));
  CHECK(said({segment(kAddress, 4_MiB, {used}), segment(kAddress + 2_MiB, 2_MiB, {used})}));
  CHECK(said({segment(kAddress, 1_MiB, {used})}));
}

TEST_CASE("a pickle that unfolds to more than four times its size is rejected before it has", "[snapshot][pickle]") {
  std::string empty_lists(4 << 20, ']');  // 32 bytes each
  CHECK(message_of("\x80\x04](" + empty_lists + "e.").find("four times") != std::string::npos);
  std::string nothing(16 << 20, 'N');  // 8 bytes each
  CHECK(message_of("\x80\x04](" + nothing + "e.").find("four times") != std::string::npos);
}

TEST_CASE("pickles that are no snapshots are rejected with one line", "[snapshot][pickle]") {
  CHECK(message_of("\x80\x04K\x01.").find("has no segments") != std::string::npos);
  CHECK(message_of("\x80\x04}.").find("has no segments") != std::string::npos);
  CHECK(message_of("\x80\x09K\x01.").find("newer than 5") != std::string::npos);
  CHECK(message_of("\x80\x04X\xff\xff\xff\xff"
                   "abc")
            .find("is cut off after") != std::string::npos);
  CHECK(message_of("\x80\x04.").find("is damaged at byte") != std::string::npos);
  CHECK(message_of("\x80\x04u.").find("is damaged at byte") != std::string::npos);
}

TEST_CASE("a damaged snapshot is read as far as it makes sense, or rejected; never worse", "[snapshot][fuzz]") {
  const std::string whole = out_of_memory();
  std::mt19937_64 random(13);
  const TestFolder folder;
  for (int round = 0; round < 600; ++round) {
    std::string bytes = whole;
    if (round % 3 == 0) bytes.resize(random() % bytes.size());
    for (uint64_t i = random() % 8; i > 0 && bytes.size() > 2; --i) {
      bytes[2 + random() % (bytes.size() - 2)] = static_cast<char>(random());
    }
    try {
      const Trace trace = to_trace(read_snapshot(folder.write("damaged", bytes)));
      to_text(make_report(trace, {}), {});
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::input);
    }
  }
}
