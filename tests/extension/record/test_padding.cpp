#include <array>
#include <vector>

#include "extension/record/padding.h"
#include "tests/catch.h"

namespace oomdiag {
namespace {

template <typename Number, size_t kDimensions>
std::optional<Padding> padding_of(const std::vector<Number>& numbers, const std::array<int64_t, kDimensions>& sizes) {
  return find_padding(reinterpret_cast<const std::byte*>(numbers.data()), sizeof(Number), sizes);
}

/// Sequences 1, 2, 3, …, of so many positions, the rest of which is one value; in front where `from_end` is false.
std::vector<int64_t> texts(const std::vector<int64_t>& lengths, int64_t positions, int64_t value,
                           bool from_end = true) {
  std::vector<int64_t> numbers;
  for (const int64_t length : lengths) {
    for (int64_t i = 0; i < positions; ++i) {
      const int64_t place = from_end ? i : positions - 1 - i;
      numbers.push_back(place < length ? 1 + place : value);
    }
  }
  return numbers;
}

}  // namespace

TEST_CASE("the longest sequence and the part that is no padding are found behind the sequences and before them",
          "[record]") {
  const std::vector<int64_t> lengths{10, 20, 5, 15};
  for (const bool from_end : {true, false}) {
    CHECK(padding_of(texts(lengths, 100, 50256, from_end), std::array<int64_t, 2>{4, 100}) ==
          Padding{.longest = 20, .per_mille = 125});
  }
  CHECK(padding_of(texts({100, 20, 5, 15}, 100, -100), std::array<int64_t, 2>{4, 100}) ==
        Padding{.longest = 100, .per_mille = 350});
}

TEST_CASE("frames of several values are padded as a whole", "[record]") {
  std::vector<float> spectrograms;
  for (const int length : {8, 32}) {
    for (int i = 0; i < 128 * 3; ++i) spectrograms.push_back(i < length * 3 ? 0.5F + static_cast<float>(i) : 0.0F);
  }
  CHECK(padding_of(spectrograms, std::array<int64_t, 3>{2, 128, 3}) == Padding{.longest = 32, .per_mille = 156});
}

TEST_CASE("what is one value throughout, hardly padded or a mask of pairs has no padding", "[record]") {
  CHECK_FALSE(padding_of(std::vector<int64_t>(400), std::array<int64_t, 2>{4, 100}));
  CHECK_FALSE(padding_of(texts({90, 80, 70, 60}, 100, 0), std::array<int64_t, 2>{4, 100}));
  CHECK_FALSE(padding_of(texts({3, 4}, 8, 0), std::array<int64_t, 2>{2, 8}));  // too few to be sequences
  std::vector<int64_t> lengths(64);
  for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = static_cast<int64_t>(i);
  CHECK_FALSE(padding_of(texts(lengths, 64, 0), std::array<int64_t, 2>{64, 64}));
}

}  // namespace oomdiag
