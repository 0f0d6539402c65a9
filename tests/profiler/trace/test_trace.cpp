#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <semaphore>
#include <thread>

#include "profiler/error.h"
#include "profiler/trace/trace.h"
#include "profiler/trace/writer.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

/// A folder that is gone at the end of the test.
struct TemporaryFolder {
  std::filesystem::path path;
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "oomdiag-test-XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path file() const { return path / "trace"; }
};

TraceBudget small_budget(int64_t chunks) {
  return {.event_bytes = chunks << 12,
          .chunk_bytes = 1 << 12,
          .names_bytes = 1 << 14,
          .contexts = 64,
          .steps = 64,
          .kept_events = 64,
          .slots_per_device = 64};
}

Event alloc(uint64_t address, int64_t bytes) {
  Event event;
  event.kind = EventKind::alloc;
  event.address = address;
  event.bytes = bytes;
  return event;
}

void write_block(TraceWriter& writer, uint64_t address, int64_t bytes) {
  Event event = alloc(address, bytes);
  writer.write(event);
  writer.add_block(event);
}

void free_block(TraceWriter& writer, uint64_t address, int64_t bytes) {
  Event event = alloc(address, bytes);
  event.kind = EventKind::free_requested;
  writer.write(event);
  writer.remove_block(0, address, event.sequence);
  writer.complete_last_free(0, address);
}

std::string message_of(const std::filesystem::path& file) {
  try {
    read_trace(file);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("what was written is read back in order", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(16));
  Context context;
  context.op = writer.intern(std::string_view("aten::relu"));
  const uint32_t id = writer.intern(context);
  for (uint64_t i = 1; i <= 200; ++i) {
    Event event = alloc(i * 512, static_cast<int64_t>(i));
    event.context = id;
    writer.write(event);
  }
  writer.publish();
  writer.finish();

  const Trace trace = read_trace(folder.file());
  REQUIRE(trace.events.size() == 200);
  CHECK(trace.events[99].sequence == 100);
  CHECK(trace.events[99].bytes == 100);
  CHECK(trace.name(trace.context(trace.events[99].context).op) == "aten::relu");
  CHECK(trace.process.end_state == EndState::exited);
  CHECK(trace.process.pid == getpid());
  CHECK(trace.overwritten_events == 0);
}

TEST_CASE("a free that completes at once is one event", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(4));
  write_block(writer, 0x1000, 512);
  free_block(writer, 0x1000, 512);
  writer.publish();

  const Trace trace = read_trace(folder.file());
  REQUIRE(trace.events.size() == 2);
  CHECK(trace.events[1].flags == kFreeCompleted);
}

TEST_CASE("equal names and contexts have one index", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(4));
  CHECK(writer.intern(std::string_view("a")) == writer.intern(std::string_view("a")));
  CHECK(writer.intern(std::string_view("a")) != writer.intern(std::string_view("b")));
  CHECK(writer.intern(std::string_view("")) == 0);
  Context context;
  CHECK(writer.intern(context) == 0);
  context.op = 7;
  CHECK(writer.intern(context) == writer.intern(context));
}

TEST_CASE("nobody but its owner reads a trace", "[trace]") {
  const TemporaryFolder folder;
  const TraceWriter writer(folder.file(), 1, small_budget(4));
  using std::filesystem::perms;
  CHECK(std::filesystem::status(folder.file()).permissions() == (perms::owner_read | perms::owner_write));
}

TEST_CASE("names that do not fit are counted and read as unknown", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(4));
  uint32_t last = 1;
  for (int i = 0; last != 0; ++i) last = writer.intern(std::string_view(std::string(1000, 'x') + std::to_string(i)));
  CHECK(writer.header().dropped_names.load() == 1);
  CHECK(writer.on());
}

TEST_CASE("a trace that outgrows its budget keeps the newest events and every live block", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(4));
  write_block(writer, 0x40000000, 4096);  // a weight: alive to the end
  for (uint64_t i = 1; i <= 5000; ++i) {
    write_block(writer, i * 512, 256);
    free_block(writer, i * 512, 256);
  }
  write_block(writer, 0x50000000, 8192);
  writer.publish();

  const Trace trace = read_trace(folder.file());
  CHECK(trace.overwritten_events > 5000);
  CHECK(trace.overwritten_events + trace.events.size() == 10002);
  CHECK(trace.events.back().bytes == 8192);
  REQUIRE(trace.initial.size() <= 2);  // the weight, and at most one block whose alloc was just overwritten
  CHECK(trace.initial.back().address == 0x40000000);
  CHECK(std::filesystem::file_size(folder.file()) < (1 << 20));
}

TEST_CASE("threads write into chunks of their own and none of their events is lost", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(256));
  std::vector<std::thread> threads;
  for (uint16_t t = 1; t <= 4; ++t) {
    threads.emplace_back([&writer, t] {
      for (uint64_t i = 0; i < 1000; ++i) {
        Event event = alloc(i, t);
        event.thread = t;
        writer.write(event);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  writer.publish();

  const Trace trace = read_trace(folder.file());
  REQUIRE(trace.events.size() == 4000);
  for (size_t i = 0; i < trace.events.size(); ++i) REQUIRE(trace.events[i].sequence == i + 1);
}

TEST_CASE("events of threads that take turns are walked in order, forwards, by index and in slices", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(2048));
  std::binary_semaphore ping(0), pong(0);
  constexpr uint64_t kTurns = 3000;
  const auto write = [&](uint64_t turn) {
    for (uint64_t i = 0; i <= turn % 5; ++i) {
      Event event = alloc(turn, 1);
      event.call_id = static_cast<uint32_t>(turn);
      writer.write(event);
    }
  };
  std::thread other([&] {
    for (uint64_t turn = 1; turn < kTurns; turn += 2) ping.acquire(), write(turn), pong.release();
  });
  for (uint64_t turn = 0; turn < kTurns; turn += 2) write(turn), ping.release(), pong.acquire();
  other.join();
  writer.publish();

  const Trace trace = read_trace(folder.file());
  REQUIRE(trace.events.size() == kTurns * 3);
  uint64_t expected = 0, turn = 0;
  for (const Event& event : trace.events) {
    REQUIRE(event.sequence == ++expected);
    REQUIRE((event.address == turn || event.address == turn + 1));
    turn = event.address;
  }
  for (uint64_t i = 0; i < trace.events.size(); i += 7) {
    REQUIRE(trace.events[i].sequence == i + 1);
    REQUIRE(trace.events.from(i)->sequence == i + 1);
  }
  const auto slice = trace.events.slice(2000, 8000, 1 << 20);
  REQUIRE(slice.size() == 6000);
  CHECK(slice.front().sequence == 2001);
  CHECK(slice.back().sequence == 8000);
  CHECK(trace.events.slice(2000, 8000, 10).size() == 10);
  CHECK(trace.events.slice(8990, 99999, 100).size() == 10);
}

TEST_CASE("a trace that is cut off or deleted while it is read does no harm", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(4096));
  for (uint64_t i = 1; i <= 100000; ++i) write_block(writer, i * 512, 100);
  writer.publish();
  const std::filesystem::path copy = folder.path / "copy";
  std::filesystem::copy_file(folder.file(), copy);

  const Trace trace = read_trace(copy);
  REQUIRE(trace.events.size() == 100000);
  std::filesystem::resize_file(copy, 1 << 20);
  std::filesystem::remove(copy);
  uint64_t walked = 0, there = 0;
  for (const Event& event : trace.events) ++walked, there += event.kind == EventKind::alloc ? 1 : 0;
  CHECK(walked == 100000);
  CHECK(there < walked);
  CHECK(trace.events.back().kind == EventKind::none);
  CHECK(trace.events.lost() == walked - there);
}

TEST_CASE("events that are overwritten between two passes read as nothing, and are counted once", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(4096));
  for (uint64_t i = 1; i <= 100000; ++i) write_block(writer, i * 512, 100);
  writer.publish();
  const Trace trace = read_trace(folder.file());
  const auto count_there = [&] {
    uint64_t there = 0;
    for (const Event& event : trace.events) there += event.kind == EventKind::alloc ? 1 : 0;
    return there;
  };
  REQUIRE(count_there() == 100000);
  REQUIRE(trace.events.lost() == 0);

  // As when the first chunk is used again: whole events, but later ones.
  std::fstream file(folder.file(), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(writer.header().chunks_offset + sizeof(ChunkHeader)));
  for (uint64_t i = 0; i < 10; ++i) {
    Event later = alloc(512, 1 << 30);
    later.sequence = 200000 + i;
    file.write(reinterpret_cast<const char*>(&later), sizeof later);
  }
  file.close();
  for (int pass = 0; pass < 2; ++pass) {
    CHECK(count_there() == 99990);
    CHECK(trace.events.lost() == 10);
  }
  CHECK(trace.events.front() == Event{.sequence = 1});
}

TEST_CASE("a trace that its program goes on to overwrite is read as it was at one moment", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(64));
  writer.publish();
  uint64_t address = 0;
  const auto train = [&](int events) {
    for (int i = 0; i < events; i += 2) {
      write_block(writer, ++address * 512, 100);
      free_block(writer, address * 512, 100);
    }
  };
  train(100'000);
  const Trace trace = read_trace(folder.file());
  const uint64_t first = trace.events.front().sequence, size = trace.events.size();
  REQUIRE(size > 3000);
  train(100'000);

  uint64_t expected = first;
  for (const Event& event : trace.events) {
    REQUIRE(event.sequence == expected++);
    REQUIRE(event.bytes == 100);
  }
  CHECK(trace.events.lost() == 0);
  CHECK(trace.events.back().sequence == 100'000);
}

TEST_CASE("a trace that was cut off is an error that says how much is missing", "[trace]") {
  const TemporaryFolder folder;
  {
    TraceWriter writer(folder.file(), 1, small_budget(64));
    for (uint64_t i = 1; i <= 1000; ++i) write_block(writer, i * 512, 100);
    writer.publish();
    writer.finish();
  }
  const auto error_at = [&](uint64_t bytes) -> std::string {
    std::filesystem::resize_file(folder.file(), bytes);
    try {
      read_trace(folder.file());
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  const uint64_t whole = std::filesystem::file_size(folder.file());
  const uint64_t written = [&] {
    const Trace trace = read_trace(folder.file());
    REQUIRE(trace.events.size() == 1000);
    return whole - (64 - 16) * (1 << 12);  // 63 events a chunk
  }();
  CHECK(error_at(written) == "");  // what nobody wrote is not missed
  CHECK(error_at(written - 1) ==
        folder.file().string() + " is cut off: 1 of its " + std::to_string(written) + " bytes are missing");
  CHECK(error_at(4096) == folder.file().string() + " is cut off: " + std::to_string(written - 4096) + " of its " +
                              std::to_string(written) + " bytes are missing");
}

TEST_CASE("a name that is too long is cut between two characters", "[trace]") {
  const TemporaryFolder folder;
  TraceWriter writer(folder.file(), 1, small_budget(16));
  const uint32_t ascii = writer.intern(std::string(4097, 'a'));
  const uint32_t letters = writer.intern("x" + [] {
    std::string text;
    for (int i = 0; i < 4096; ++i) text += "ä";
    return text;
  }());
  writer.publish();
  const Trace trace = read_trace(folder.file());
  CHECK(trace.name(ascii) == std::string(4096, 'a'));
  CHECK(trace.name(letters).size() == 4095);
  CHECK(trace.name(letters).ends_with("ä"));
}

TEST_CASE("after SIGKILL the trace ends with a whole event", "[trace]") {
  const TemporaryFolder folder;
  const pid_t child = fork();
  if (child == 0) {
    TraceWriter writer(folder.file(), 1, small_budget(1024));
    writer.publish();
    for (uint64_t i = 1; i <= 10000; ++i) {
      write_block(writer, i * 512, static_cast<int64_t>(i));
      if (i == 9000) kill(getpid(), SIGKILL);
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  REQUIRE(WIFSIGNALED(status));

  const Trace trace = read_trace(folder.file());
  REQUIRE(trace.events.size() == 9000);
  CHECK(trace.events.back().bytes == 9000);
  CHECK(trace.process.end_state == EndState::running);
}

TEST_CASE("the table of live blocks survives any order of allocations and frees", "[trace]") {
  const uint32_t capacity = GENERATE(256, 2048);  // the index grows at 256
  std::vector<Event> slots(capacity);
  LiveTable table(slots.data(), capacity, capacity);
  std::mt19937_64 random(7);
  std::vector<uint64_t> alive;
  const auto context_of = [](uint64_t address) { return static_cast<uint32_t>(address >> 9); };
  for (uint64_t step = 1; step < 40000; ++step) {
    if (alive.size() < capacity && (alive.empty() || random() % 3 != 0)) {
      Event event = alloc((random() % 1000000 + 1) * 512, 1);
      if (std::find(alive.begin(), alive.end(), event.address) != alive.end()) continue;
      event.sequence = step;
      event.context = context_of(event.address);
      REQUIRE(table.insert(event));
      alive.push_back(event.address);
    } else {
      const size_t victim = random() % alive.size();
      REQUIRE(table.erase(alive[victim], 1) == context_of(alive[victim]));
      alive[victim] = alive.back();
      alive.pop_back();
    }
  }
  CHECK(table.used() > capacity / 2);
  std::vector<uint64_t> in_file;
  for (const Event& slot : slots) {
    if (slot.sequence != 0 && (slot.flags & kSlotFreed) == 0) in_file.push_back(slot.address);
  }
  std::sort(alive.begin(), alive.end());
  std::sort(in_file.begin(), in_file.end());
  CHECK(in_file == alive);
  CHECK(table.used() == alive.size());
}

TEST_CASE("a full table of live blocks says no and forgets nothing", "[trace]") {
  std::vector<Event> slots(2);
  LiveTable table(slots.data(), 2, 2);
  Event event = alloc(512, 1);
  event.sequence = 1;
  CHECK(table.insert(event));
  event.address = 1024;
  CHECK(table.insert(event));
  event.address = 2048;
  CHECK_FALSE(table.insert(event));
  table.erase(512, 1);
  CHECK(table.insert(event));
}

TEST_CASE("a folder that cannot be written to is an error that names it", "[trace]") {
  try {
    TraceWriter writer("/proc/no-such-folder/trace", 1);
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::environment);
    CHECK(std::string(error.what()).find("/proc/no-such-folder/trace") != std::string::npos);
  }
}

TEST_CASE("files that are no traces are rejected with one line", "[trace]") {
  const TemporaryFolder folder;
  CHECK(message_of(folder.file()).find("cannot read") == 0);
  CHECK(message_of(folder.path).find("cannot read") == 0);
  std::ofstream(folder.file()) << "";
  CHECK(message_of(folder.file()).find("is not a trace of oomdiag") != std::string::npos);
  std::ofstream(folder.file()) << std::string(10000, 'x');
  CHECK(message_of(folder.file()).find("is not a trace of oomdiag") != std::string::npos);
}

TEST_CASE("a header that lies about names and contexts costs no memory: unwritten parts of a file are none",
          "[trace]") {
  const TemporaryFolder folder;
  {
    TraceWriter writer(folder.file(), 1, {.names_bytes = 24 << 20, .contexts = 1 << 18});
    writer.intern(std::string_view("aten::relu"));
    writer.intern(Context{.op = 1});
    writer.publish();
    writer.header().names_used.store(24 << 20);
    writer.header().context_count.store(1 << 18);
    const Trace trace = read_trace(folder.file());
    CHECK(trace.names == std::vector<std::string>{"", "aten::relu"});
    CHECK(trace.contexts.size() == 2);
  }
  std::fstream file(folder.file(), std::ios::in | std::ios::out | std::ios::binary);
  const uint64_t slots = uint64_t{1} << 27;
  file.seekp(offsetof(TraceHeader, slots_per_device)).write(reinterpret_cast<const char*>(&slots), sizeof slots);
  file.close();
  CHECK(message_of(folder.file()).find("makes no sense") != std::string::npos);
}

TEST_CASE("a damaged trace is read as far as it is whole, or rejected; never worse", "[trace][fuzz]") {
  const TemporaryFolder folder;
  {
    TraceWriter writer(folder.file(), 2, small_budget(8));
    for (uint64_t i = 1; i <= 400; ++i) write_block(writer, i * 512, 100);
    writer.publish();
  }
  std::ifstream in(folder.file(), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  std::mt19937_64 random(11);
  const auto damaged = folder.path / "damaged";
  for (int round = 0; round < 400; ++round) {
    std::string bytes = whole;
    if (round % 2 == 0) bytes.resize(random() % bytes.size());
    for (uint64_t i = random() % 32; i > 0 && !bytes.empty(); --i) {
      const uint64_t within = round % 3 == 0 ? std::min<uint64_t>(bytes.size(), kHeaderBytes) : bytes.size();
      bytes[8 + random() % (std::max<uint64_t>(within, 9) - 8)] = static_cast<char>(random());
    }
    std::ofstream(damaged, std::ios::binary) << bytes;
    try {
      const Trace trace = read_trace(damaged);
      for (const Event& event : trace.events) {
        trace.name(trace.context(event.context).op);
        trace.time_ns(event);
      }
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::input);
    }
  }
}
