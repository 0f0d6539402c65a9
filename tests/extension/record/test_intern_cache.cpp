#include <string>
#include <vector>

#include "extension/record/intern_cache.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

struct Recording {
  TestFolder folder;
  TraceWriter writer;
  explicit Recording(const TraceBudget& budget = {}) : writer(folder.path() / "trace", 1, budget) {}
};

}  // namespace

TEST_CASE("a cache gives the ids of the trace, however much is put into it", "[record]") {
  Recording recording;
  InternCache cache(recording.writer);
  std::vector<std::string> texts;
  for (int i = 0; i < 40'000; ++i) texts.push_back("name " + std::to_string(i));
  for (int round = 0; round < 2; ++round) {
    for (const std::string& text : texts) {
      const uint32_t id = cache.name(text.c_str());
      REQUIRE(id == recording.writer.intern(std::string_view(text)));
      const Context context{.op = id, .inner = id / 2};
      REQUIRE(cache.context(context) == recording.writer.intern(context));
      const Context inside{.op = id, .inner = id + 1};
      REQUIRE(cache.inner_context(cache.context(context), inside) == recording.writer.intern(inside));
    }
  }
}

TEST_CASE("a node has the context that is this node and nothing else, however long its name is", "[record]") {
  Recording recording;
  InternCache cache(recording.writer);
  for (int round = 0; round < 3; ++round) {
    for (size_t length : {0, 1, 7, 8, 54, 55, 56, 200}) {
      const std::string name(length, 'n');
      const InternCache::Node node = cache.node(name);
      CHECK(node.name == recording.writer.intern(std::string_view(name)));
      CHECK(node.name == cache.name(name));
      CHECK(node.context == recording.writer.intern(Context{.node = node.name}));
    }
  }
}

TEST_CASE("a text at the address of another one is not taken for it", "[record]") {
  Recording recording;
  InternCache cache(recording.writer);
  char text[] = "aten::add";
  const uint32_t add = cache.name(text);
  text[6] = 'o';
  CHECK(cache.name(text) != add);
  text[6] = 'a';
  CHECK(cache.name(text) == add);
}

TEST_CASE("an op inside of places that did not fit is not taken for that of another such place", "[record]") {
  Recording recording;
  InternCache cache(recording.writer);
  const Context first{.op = 1, .inner = 7}, second{.op = 2, .inner = 7};
  CHECK(cache.inner_context(0, first) == recording.writer.intern(first));
  CHECK(cache.inner_context(0, second) == recording.writer.intern(second));
}

TEST_CASE("a place that did not fit into the trace is not asked for again and again", "[record]") {
  Recording recording({.contexts = 4});
  InternCache cache(recording.writer);
  for (uint32_t op = 1; op < 4; ++op) CHECK(cache.context({.op = op}) != 0);
  CHECK(cache.context({.op = 9}) == 0);
  const uint64_t dropped = recording.writer.header().dropped_names.load();
  for (int i = 0; i < 100; ++i) CHECK(cache.context({.op = 9}) == 0);
  CHECK(recording.writer.header().dropped_names.load() == dropped);
}
