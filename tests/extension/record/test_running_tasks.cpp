#include "extension/record/running_tasks.h"
#include "tests/catch.h"

namespace oomdiag {
namespace {

std::vector<int> ids(const RunningTasks& tasks, size_t nodes) {
  std::vector<int> result;
  for (const RunningTask& task : tasks.running(nodes)) result.push_back(task.id);
  return result;
}

}  // namespace

TEST_CASE("the nodes of a backward pass are of one task, which begins with the first of them", "[record]") {
  RunningTasks tasks;
  int nodes[2];

  CHECK(tasks.begin_node(0, 7, &nodes[0]));
  CHECK_FALSE(tasks.begin_node(0, 7, &nodes[1]));

  REQUIRE(tasks.running(1).size() == 1);
  CHECK(tasks.running(1)[0].root == &nodes[0]);
}

TEST_CASE("a first node that does not live on is replaced by the next one, in the same pass", "[record]") {
  RunningTasks tasks;
  int nodes[2];

  CHECK(tasks.begin_node(0, 7, nullptr));  // GraphRoot
  CHECK(tasks.running(1)[0].root == nullptr);
  CHECK_FALSE(tasks.begin_node(0, 7, &nodes[0]));
  CHECK_FALSE(tasks.begin_node(0, 7, &nodes[1]));
  CHECK(tasks.running(1)[0].root == &nodes[0]);
}

TEST_CASE("while a nested backward pass runs, so does the one around it", "[record]") {
  RunningTasks tasks;
  tasks.begin_node(0, 7, nullptr);
  tasks.begin_node(1, 8, nullptr);

  CHECK(ids(tasks, 2) == std::vector{7, 8});
}

TEST_CASE("nodes of a nested backward pass that has ended are not handed out", "[record]") {
  RunningTasks tasks;
  tasks.begin_node(0, 5, nullptr);
  for (const int nested : {6, 7, 8}) tasks.begin_node(1, nested, nullptr);

  CHECK(ids(tasks, 1) == std::vector{5});
}

TEST_CASE("nothing is handed out where no node runs", "[record]") {
  RunningTasks tasks;
  tasks.begin_node(0, 5, nullptr);

  CHECK(ids(tasks, 0).empty());
}

TEST_CASE("the node that follows forgets what ran inside of the one before", "[record]") {
  RunningTasks tasks;
  tasks.begin_node(0, 5, nullptr);
  tasks.begin_node(1, 6, nullptr);
  tasks.begin_node(0, 5, nullptr);

  CHECK(tasks.begin_node(1, 6, nullptr));
}

}  // namespace oomdiag
