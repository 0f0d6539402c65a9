#include <string>
#include <string_view>

#include "extension/virtual_device/driver/contents.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

void write(Contents& contents, uintptr_t at, std::string_view text) { contents.write(at, text.data(), text.size()); }

/// What is read, unknown bytes as dots.
std::string read(Contents& contents, uintptr_t at, size_t bytes, Origin origin) {
  std::string text(bytes, '?');
  CHECK(contents.read(at, text.data(), bytes) == origin);
  for (char& letter : text) {
    if (letter == 0) letter = '.';
  }
  return text;
}

}  // namespace

TEST_CASE("what the host wrote reads back, the rest as zeros of a kernel", "[virtual_device]") {
  Contents contents;
  write(contents, 100, "hello");
  CHECK(read(contents, 100, 5, Origin::host) == "hello");
  CHECK(read(contents, 98, 9, Origin::kernel) == "..hello..");
  CHECK(read(contents, 102, 2, Origin::host) == "ll");
  CHECK(read(contents, 500, 3, Origin::kernel) == "...");
}

TEST_CASE("later writes and sets cover earlier ones, in part too", "[virtual_device]") {
  Contents contents;
  write(contents, 100, "aaaaaaaaaa");
  write(contents, 103, "bb");
  contents.fill(107, 'c', 6);
  CHECK(read(contents, 100, 13, Origin::host) == "aaabbaacccccc");
  contents.fill(0, 0, 1000);
  CHECK(read(contents, 100, 3, Origin::host) == "...");
}

TEST_CASE("a forgotten range is a kernel's again", "[virtual_device]") {
  Contents contents;
  write(contents, 100, "abcdefgh");
  contents.forget(102, 4);
  CHECK(read(contents, 100, 8, Origin::kernel) == "ab....gh");
  contents.forget(0, 1000);
  CHECK(read(contents, 100, 2, Origin::kernel) == "..");
}

TEST_CASE("a copy on the card takes along what is known and forgets what it covers", "[virtual_device]") {
  Contents contents;
  write(contents, 100, "abcd");
  write(contents, 200, "xxxxxxxx");
  contents.copy(200, 98, 6);
  CHECK(read(contents, 200, 8, Origin::kernel) == "..abcdxx");
  contents.copy(101, 100, 4);  // the ranges overlap
  CHECK(read(contents, 100, 5, Origin::host) == "aabcd");
}

TEST_CASE("bulk data is known to be the host's, and not kept", "[virtual_device]") {
  Contents contents;
  const std::string bulk(kMostPieceBytes + 1, 'x');
  contents.write(1 << 30, bulk.data(), bulk.size());
  CHECK(read(contents, 1 << 30, 3, Origin::dropped) == "...");
}

TEST_CASE("all that is kept stays within a bound, and small things are kept longest", "[virtual_device]") {
  Contents contents;
  const std::string piece(kMostPieceBytes, 'x');
  write(contents, 1, "small");
  for (uintptr_t i = 1; i <= 80; ++i) contents.write(i << 30, piece.data(), piece.size());
  CHECK(read(contents, 1, 5, Origin::host) == "small");
  CHECK(read(contents, uintptr_t{1} << 30, 3, Origin::dropped) == "...");
}
