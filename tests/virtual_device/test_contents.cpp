#include <memory>
#include <string>
#include <string_view>
#include <utility>

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

/// What another process will send: "hello", or nothing that is known.
struct Letter {
  bool is_known = true;
  int fetched = 0;
  int released = 0;
};
void promise(Contents& contents, uintptr_t at, Letter& letter) {
  const auto fetch = [](void* context, void* into) {
    auto& sender = *static_cast<Letter*>(context);
    ++sender.fetched;
    std::string_view("hello").copy(static_cast<char*>(into), 5);
    return sender.is_known;
  };
  std::shared_ptr<void> context(&letter, [](void* sender) { ++static_cast<Letter*>(sender)->released; });
  contents.promise(at, std::make_shared<Promise>(5, fetch, std::move(context)));
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
  contents.fill(107, Pattern("c", 1), 6);
  CHECK(read(contents, 100, 13, Origin::host) == "aaabbaacccccc");
  contents.fill(0, Pattern("\0", 1), 1000);
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

TEST_CASE("a copy on the GPU takes along what is known and forgets what it covers", "[virtual_device]") {
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
  const std::string bulk(kMaxPieceBytes + 1, 'x');
  contents.write(1 << 30, bulk.data(), bulk.size());
  CHECK(read(contents, 1 << 30, 3, Origin::dropped) == "...");
}

TEST_CASE("all that is kept stays within a bound, and small things are kept longest", "[virtual_device]") {
  Contents contents;
  const std::string piece(kMaxPieceBytes, 'x');
  write(contents, 1, "small");
  for (uintptr_t i = 1; i <= 80; ++i) contents.write(i << 30, piece.data(), piece.size());
  CHECK(read(contents, 1, 5, Origin::host) == "small");
  CHECK(read(contents, uintptr_t{1} << 30, 3, Origin::dropped) == "...");
}

TEST_CASE("what is promised is fetched when it is looked at, once, wherever it was copied", "[virtual_device]") {
  Contents contents;
  Letter letter;
  promise(contents, 100, letter);
  contents.copy(200, 101, 3);
  write(contents, 104, "y");
  CHECK(letter.fetched == 0);
  CHECK(read(contents, 200, 3, Origin::host) == "ell");
  CHECK(read(contents, 100, 5, Origin::host) == "helly");
  CHECK(letter.fetched == 1);
  CHECK(letter.released == 1);
}

TEST_CASE("what is promised is a kernel's if its sender does not know it", "[virtual_device]") {
  Contents contents;
  Letter letter{.is_known = false};
  promise(contents, 100, letter);
  CHECK(read(contents, 100, 5, Origin::kernel) == ".....");
}

TEST_CASE("what is overwritten before it came is never waited for", "[virtual_device]") {
  Contents contents;
  Letter letter;
  promise(contents, 100, letter);
  write(contents, 98, "0123456789");
  CHECK(read(contents, 98, 10, Origin::host) == "0123456789");
  promise(contents, 100, letter);
  contents.forget(100, 5);
  CHECK(letter.fetched == 0);
  CHECK(letter.released == 2);
}

TEST_CASE("a guess reads back, as a kernel's", "[virtual_device]") {
  Contents contents;
  contents.write(100, "yes", 3, Origin::kernel);
  contents.copy(200, 100, 3);
  CHECK(read(contents, 200, 3, Origin::kernel) == "yes");
}

TEST_CASE("a number fills a range of any length, in parts and copies too", "[virtual_device]") {
  Contents contents;
  contents.fill(100, Pattern("abcd", 4), 1 << 30);
  CHECK(read(contents, 100, 8, Origin::host) == "abcdabcd");
  CHECK(read(contents, 103, 4, Origin::host) == "dabc");
  contents.forget(100, 6);
  CHECK(read(contents, 104, 6, Origin::kernel) == "..cdab");
  contents.copy(50, 107, 3);
  CHECK(read(contents, 50, 3, Origin::host) == "dab");
  CHECK(Pattern("xyxy", 4).bytes() == 2);
}

TEST_CASE("whether all numbers of a range are one is known without reading them", "[virtual_device]") {
  Contents contents;
  std::string number(4, '?');
  const auto look = [&](uintptr_t from, size_t bytes) { return contents.look(from, bytes, number.data(), 4); };
  contents.fill(1000, Pattern("abcd", 4), 4000);
  CHECK(look(1000, 4000) == Uniformity::known);
  CHECK(look(1004, 100) == Uniformity::known);
  CHECK(number == "abcd");
  CHECK(look(1002, 8) == Uniformity::known);
  CHECK(number == "cdab");
  CHECK(look(996, 8) == Uniformity::unknown);
  contents.fill(2000, Pattern("abcd", 4), 40);
  CHECK(look(1000, 4000) == Uniformity::known);
  contents.fill(2000, Pattern("abce", 4), 4);
  CHECK(look(1000, 4000) == Uniformity::mixed);
  contents.fill(6000, Pattern("abcdefgh", 8), 80);
  CHECK(look(6000, 80) == Uniformity::mixed);
  contents.fill(6000, Pattern("abcd", 4), 80, Origin::kernel);
  CHECK(look(6000, 80) == Uniformity::guess);
  const std::string bulk(kMaxPieceBytes + 1, 'x');
  contents.write(1 << 30, bulk.data(), bulk.size());
  CHECK(look(1 << 30, 400) == Uniformity::dropped);
}

TEST_CASE("a kernel that was given an address may have written what was written there at once", "[virtual_device]") {
  Contents contents;
  write(contents, 100, "abcd");
  write(contents, 104, "efgh");
  contents.forget_whole(101);
  CHECK(read(contents, 100, 8, Origin::kernel) == "....efgh");
  contents.forget_whole(90);
  CHECK(read(contents, 104, 4, Origin::host) == "efgh");
}

TEST_CASE("what was dropped for others makes space for what comes later", "[virtual_device]") {
  Contents contents;
  const std::string piece(256 << 10, 'x');
  for (uintptr_t i = 1; i <= 2000; ++i) contents.write(i << 30, piece.data(), piece.size());
  for (uintptr_t i = 1; i <= 2000; ++i) contents.forget(i << 30, piece.size());
  contents.write(1 << 20, piece.data(), piece.size());
  CHECK(read(contents, 1 << 20, 3, Origin::host) == "xxx");
}
