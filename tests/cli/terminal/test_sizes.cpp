#include "cli/terminal/sizes.h"
#include "profiler/error.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("a size is a number of bytes, or has a unit of powers of 1000 or 1024", "[cli]") {
  CHECK(parse_bytes("8GiB") == int64_t{8} << 30);
  CHECK(parse_bytes("8GB") == 8'000'000'000);
  CHECK(parse_bytes("8192MiB") == int64_t{8} << 30);
  CHECK(parse_bytes("8589934592") == int64_t{8} << 30);
  CHECK(parse_bytes("11.75 GiB") == 12616466432);
  CHECK(parse_bytes("1tib") == int64_t{1} << 40);
  CHECK(parse_bytes("8g") == int64_t{8} << 30);
  CHECK(parse_bytes("8B") == 8);
  CHECK(parse_bytes("1024") == 1024);
}

TEST_CASE("nonsense is answered with the valid form", "[cli]") {
  for (const char* text :
       {"", "GiB", "8XB", "-1GiB", "0", "1e9", "nan", "inf", "8GiBs", "0x10", "99999999TiB", " 8GiB", "8 G iB!", "8"}) {
    INFO(text);
    try {
      parse_bytes(text);
      FAIL("taken for a size");
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::usage);
      CHECK(error.hint().find("8GiB") != std::string::npos);
    }
  }
}

TEST_CASE("sizes are shown in GiB with two decimals", "[cli]") { CHECK(to_gib(12620660736) == "11.75"); }
