#include "extension/record/cache_table.h"
#include "profiler/trace/mix.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

struct Entry {
  uint64_t key = 0;
  uint64_t value = 0;
};

const Entry* find(CacheTable<Entry>& table, uint64_t hash, uint64_t key) {
  return table.find(hash, [key](const Entry& entry) { return entry.key == key; });
}

}  // namespace

TEST_CASE("entries of one hash are distinguished", "[record]") {
  CacheTable<Entry> table;
  for (uint64_t key : {1, 2, 3}) table.add(7, {key, key * 10});
  for (uint64_t key : {1, 2, 3}) {
    REQUIRE(find(table, 7, key) != nullptr);
    CHECK(find(table, 7, key)->value == key * 10);
  }
  CHECK(find(table, 7, 4) == nullptr);
}

TEST_CASE("a table grows until what is asked for over and over again stays in it", "[record]") {
  CacheTable<Entry> table;
  for (uint64_t count : {1000, 4096, 8192}) {
    uint64_t missed = 0;
    for (int round = 0; round < 12; ++round) {
      missed = 0;
      for (uint64_t key = 1; key <= count; ++key) {
        const uint64_t hash = mix(key, count);
        if (const Entry* const entry = find(table, hash, key)) {
          REQUIRE(entry->value == key + count);
        } else {
          table.add(hash, {key, key + count});
          ++missed;
        }
      }
    }
    CHECK(missed == 0);
    table = {};
  }
}

TEST_CASE("a table that is full forgets, and goes on", "[record]") {
  CacheTable<Entry> table;
  for (uint64_t key = 1; key < 100'000; ++key) {
    const uint64_t hash = mix(key, 0);
    REQUIRE(find(table, hash, key) == nullptr);
    table.add(hash, {key, key});
    REQUIRE(find(table, hash, key) != nullptr);
  }
}
