#include <barrier>
#include <random>
#include <thread>
#include <vector>

#include "extension/record/learned_step.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

/// What a thread of a training program does, written as the recorder writes it.
class Worker {
 public:
  Worker(StepLearner& learner, std::atomic<uint32_t>& call_ids, uint16_t thread, uint64_t first_node = 0)
      : learner_(learner),
        call_ids_(call_ids),
        thread_(thread),
        nodes_(first_node),
        claimed_(first_node),
        step_(thread) {
    learner_.add(step_);
  }
  ~Worker() { learner_.remove(step_); }

  /// An op at this place, which allocates and makes an autograd node. What the trace says of the allocation. With `nodes_back`
  /// it is run again by the node that was made so many before.
  Event run_op(uint64_t place, int64_t bytes, bool makes_node = true, uint64_t nodes_back = 0) {
    learner_.prepare(step_, now(place));
    const bool watched = !learner_.steady();
    const uint32_t call_id = watched ? call_ids_.fetch_add(1) + 1 : 0;
    if (makes_node) ++nodes_;
    address_ += 512;
    Event event{.address = address_, .bytes = bytes, .kind = EventKind::alloc};
    if (watched) event.context = static_cast<uint32_t>(place), event.call_id = call_id;
    write(event, place);
    if (!learner_.steady() && claimed_ < nodes_) {
      Event made{.address = nodes_back == 0 ? 0 : claimed_ - nodes_back + 1,
                 .bytes = static_cast<int64_t>(nodes_ - claimed_),
                 .detail = thread_,
                 .node_sequence = claimed_,
                 .context = static_cast<uint32_t>(place),
                 .call_id = call_id,
                 .node_thread = thread_,
                 .kind = EventKind::nodes_created};
      const ThreadMark moment = now(0);
      claimed_ = nodes_;
      learner_.learn(step_, made, moment, {});
      written_.push_back(made);
    }
    return event;
  }

  /// A gradient comes to be in the block that was allocated last.
  void accumulate() {
    if (learner_.steady()) return;
    const Event event{.address = address_, .node_sequence = kAccumulateGrad, .kind = EventKind::gradient};
    learner_.learn(step_, event, now(0), {});
    written_.push_back(event);
  }

  /// A scope begins; whether it was the expected one.
  bool begin_scope(uint32_t name, uint64_t place) {
    learner_.prepare(step_, now(place));
    if (learner_.steady()) {
      repeat_notes();
      const LearnedScope* scope = learner_.repeat_scope(step_, name, now(place));
      if (scope == nullptr) learner_.leave();
      return scope != nullptr && scope->context.source == place;
    }
    const Event event{.detail = name, .kind = EventKind::scope_begin};
    learner_.learn(step_, event, now(place), {.source = static_cast<uint32_t>(place)});
    return false;
  }

  void end_step(uint32_t context = 1, bool grows = false) {
    learner_.end_step(step_, {.context = context, .next_node = nodes_, .call_ids = call_ids_, .grows = grows});
  }

  const std::vector<Event>& written() const { return written_; }
  uint64_t nodes() const { return nodes_; }
  uint64_t address() const { return address_; }
  uint64_t first_unsure_node() const { return learner_.first_unsure_node(step_, now(0)); }

 private:
  ThreadMark now(uint64_t place) const { return {.mark = place, .next_node = nodes_, .claimed = claimed_}; }

  void write(Event& event, uint64_t place) {
    if (learner_.steady()) {
      repeat_notes();
      if (learner_.repeat(step_, event, now(place))) {
        written_.push_back(event);
        return repeat_notes();
      }
      learner_.leave();
    }
    learner_.learn(step_, event, now(place), {});
    written_.push_back(event);
  }
  void repeat_notes() {
    for (Event note; learner_.next_note(step_, now(0), note);) {
      if (note.kind == EventKind::nodes_created) claimed_ = note.node_sequence + static_cast<uint64_t>(note.bytes);
      written_.push_back(note);
    }
  }

  StepLearner& learner_;
  std::atomic<uint32_t>& call_ids_;
  const uint16_t thread_;
  uint64_t nodes_, claimed_, address_ = 0;
  StepOfThread step_;
  std::vector<Event> written_;
};

/// A program of one thread, whose step is three ops.
struct Program {
  StepLearner learner;
  std::atomic<uint32_t> call_ids = 0;
  Worker main{learner, call_ids, 1};

  Program() { learner.restart(true); }
  void step(bool grows = false) {
    for (uint64_t place = 10; place < 13; ++place) main.run_op(place, 4096);
    main.accumulate();
    main.end_step(1, grows);
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }
  void become_steady() {
    steps(8);
    REQUIRE(learner.steady());
  }
};

}  // namespace

TEST_CASE("steps that repeat are learned, and then recorded without being watched", "[record][steady]") {
  Program program;
  std::vector<TrainingMode> modes;
  for (int i = 0; i < 6; ++i) program.step(), modes.push_back(program.learner.mode());
  using enum TrainingMode;
  CHECK(modes == std::vector{learning, learning, recording, steady, steady, steady});

  const size_t before = program.main.written().size();
  const uint64_t first_node = program.main.nodes();
  const uint32_t first_call_id = program.call_ids.load() - 3;  // those of the step are taken ahead
  program.step();
  program.main.run_op(10, 4096);  // of the next step: with it comes what followed the last allocation
  const std::vector<Event> recorded(program.main.written().begin() + static_cast<long>(before),
                                    program.main.written().end());
  REQUIRE(recorded.size() == 9);
  for (uint32_t op = 0; op < 3; ++op) {
    const Event& alloc = recorded[op * 2];
    CHECK(alloc.kind == EventKind::alloc);
    CHECK(alloc.context == 10 + op);
    CHECK(alloc.call_id == first_call_id + 1 + op);
    const Event& nodes = recorded[op * 2 + 1];
    CHECK(nodes.kind == EventKind::nodes_created);
    CHECK(nodes.node_sequence == first_node + op);
    CHECK(nodes.context == 10 + op);
  }
  CHECK(recorded[6].kind == EventKind::gradient);
  CHECK(recorded[6].address == recorded[4].address);
}

TEST_CASE("which node ran an op again is recorded in steady training too, by this step's numbers", "[record][steady]") {
  Program program;
  const auto step = [&] {
    for (uint64_t place = 10; place < 13; ++place) program.main.run_op(place, 4096);
    program.main.run_op(13, 512, true, 2);
    program.main.end_step();
  };
  for (int i = 0; i < 4; ++i) step();
  REQUIRE(program.learner.steady());
  step();
  program.main.run_op(10, 4096);
  uint64_t recorded = 0;
  for (const Event& event : program.main.written()) {
    if (event.kind != EventKind::nodes_created || event.context != 13) continue;
    CHECK(event.address == event.node_sequence - 2 + 1);
    ++recorded;
  }
  CHECK(recorded == 5);
}

TEST_CASE("the same sizes at another place, with other nodes or in another order end steady training",
          "[record][steady]") {
  Program program;
  program.become_steady();
  program.main.run_op(10, 4096);
  CHECK(program.learner.steady());
  const auto surprise = GENERATE(0, 1, 2, 3, 4);
  Event recorded;
  switch (surprise) {
    case 0:
      recorded = program.main.run_op(20, 4096);
      break;
    case 1:
      recorded = program.main.run_op(11, 4096, false);
      break;
    case 2:
      recorded = program.main.run_op(11, 8192);
      break;
    case 3:
      recorded = program.main.run_op(12, 4096);
      break;
    default:
      program.main.end_step();
  }
  CHECK_FALSE(program.learner.steady());
  CHECK(recorded.context == 0);  // it was made while nobody watched
}

TEST_CASE("which op made the nodes since the last allocation is not known after a surprise", "[record][steady]") {
  Program program;
  program.become_steady();
  program.main.run_op(10, 4096);
  const uint64_t sure = program.main.nodes();
  program.main.run_op(20, 4096);
  CHECK(program.main.first_unsure_node() <= sure);
}

TEST_CASE("a step that grows is watched, and so is the one after", "[record][steady]") {
  Program program;
  program.become_steady();
  program.step(true);
  CHECK(program.learner.mode() == TrainingMode::recording);
  program.step(true);
  CHECK(program.learner.mode() == TrainingMode::recording);
  program.step();
  CHECK(program.learner.steady());
}

TEST_CASE("every 64th step is watched in full", "[record][steady]") {
  Program program;
  program.become_steady();
  int watched = 0;
  for (int i = 0; i < 650; ++i) program.step(), watched += program.learner.steady() ? 0 : 1;
  CHECK(watched == 10);
}

TEST_CASE("scopes are part of the step", "[record][steady]") {
  Program program;
  const auto step = [&](uint64_t place) {
    const bool expected = program.main.begin_scope(7, place);
    program.step();
    return expected;
  };
  for (int i = 0; i < 8; ++i) step(30);
  REQUIRE(program.learner.steady());
  CHECK(step(30));
  CHECK_FALSE(step(31));
}

TEST_CASE("an optimizer that steps in between ends no step, unless it is the only one left", "[record][steady]") {
  Program program;
  for (int i = 0; i < 10; ++i) {
    program.main.run_op(40, 512);
    program.main.end_step(2);
    program.step();
  }
  CHECK(program.learner.steady());
  const uint32_t steps = program.learner.step();
  for (int i = 0; i < 15; ++i) program.main.end_step(1);
  CHECK(program.learner.step() == steps);
  program.main.end_step(1);
  CHECK(program.learner.step() == steps + 1);
}

TEST_CASE("what a second thread does again in backward is counted from its own nodes", "[record][steady]") {
  Program program;
  Worker engine(program.learner, program.call_ids, 2, 1000);
  const auto step = [&] {
    for (uint64_t place = 10; place < 13; ++place) program.main.run_op(place, 4096);
    engine.run_op(50, 2048);
    engine.run_op(51, 2048);
    program.main.end_step();
  };
  for (int i = 0; i < 8; ++i) step();
  REQUIRE(program.learner.steady());
  const uint64_t first = engine.nodes();
  step();
  CHECK(program.learner.steady());
  CHECK(engine.written().back().kind == EventKind::nodes_created);
  CHECK(engine.written().back().node_sequence == first + 1);
}

TEST_CASE("who does not want steady training does not get it", "[record][steady]") {
  Program program;
  program.learner.restart(false);
  program.steps(20);
  CHECK(program.learner.mode() == TrainingMode::learning);
}

// For ThreadSanitizer: whoever reads or clears what another thread writes is found here.
TEST_CASE("threads come, go and surprise each other while one of them steps", "[record][steady][threads]") {
  StepLearner learner;
  std::atomic<uint32_t> call_ids = 0;
  learner.restart(true);
  constexpr int kSteps = 400;
  constexpr int kThreads = 4;
  std::atomic<bool> done = false;
  std::atomic<uint16_t> next_thread = 2;
  std::vector<std::jthread> others;
  for (unsigned t = 0; t < kThreads; ++t) {
    others.emplace_back([&, t] {
      std::mt19937 random(t);
      while (!done.load()) {
        Worker worker(learner, call_ids,
                      next_thread.fetch_add(1));  // a short thread, as far as the learner is concerned
        const bool calm = random() % 2 == 0;
        for (int i = 0; i < 50; ++i) worker.run_op(60 + (calm ? 0 : random() % 3), 512), worker.accumulate();
        std::this_thread::yield();
      }
    });
  }
  Worker main(learner, call_ids, 1);
  for (int i = 0; i < kSteps; ++i) {
    for (uint64_t place = 10; place < 20; ++place) main.run_op(place, 4096);
    main.end_step();
    if (i % 50 == 49) learner.restart(true);
  }
  done = true;
  CHECK(learner.step() == kSteps + 1);
}

TEST_CASE("threads that do their part in each step are steady together", "[record][steady][threads]") {
  StepLearner learner;
  std::atomic<uint32_t> call_ids = 0;
  learner.restart(true);
  constexpr int kSteps = 60;
  std::barrier turn(2);
  std::jthread engine([&] {
    Worker worker(learner, call_ids, 2, 500);
    for (int i = 0; i < kSteps; ++i) {
      turn.arrive_and_wait();  // forward is over
      for (uint64_t place = 30; place < 40; ++place) worker.run_op(place, 1024), worker.accumulate();
      turn.arrive_and_wait();
    }
  });
  Worker main(learner, call_ids, 1);
  for (int i = 0; i < kSteps; ++i) {
    for (uint64_t place = 10; place < 20; ++place) main.run_op(place, 4096);
    turn.arrive_and_wait();
    turn.arrive_and_wait();
    main.end_step();
  }
  CHECK(learner.steady_steps() == kSteps - 4);
}
