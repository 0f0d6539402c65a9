#include "profiler/shape_function/polynomial.h"
#include "tests/catch.h"

namespace oomdiag {
namespace {

std::optional<Polynomial> fit(const std::vector<ShapePoint>& points, int64_t (*size)(const ShapePoint&)) {
  std::vector<int64_t> sizes;
  for (const ShapePoint& point : points) sizes.push_back(size(point));
  return fit_polynomial(points, sizes);
}

const std::vector<ShapePoint> kBatches{{4}, {16}, {70}, {93}};
const std::vector<ShapePoint> kBatchesAndLengths{{2, 96}, {8, 128}, {5, 256}, {16, 64}, {3, 512}, {11, 320}};

}  // namespace

TEST_CASE("a size that follows the batch is found exactly", "[shape_function]") {
  const auto found = fit(kBatches, [](const ShapePoint& p) { return 602112 * p[0] + 512; });
  REQUIRE(found);
  CHECK(found->at({1000}) == 602112 * 1000 + 512);
  CHECK(fit(kBatches, [](const ShapePoint&) { return int64_t{4096}; })->at({1}) == 4096);
  CHECK(fit(kBatches, [](const ShapePoint& p) { return 6 * p[0] * p[0]; })->at({7}) == 294);
}

TEST_CASE("attention's scores are a product of batch and length squared", "[shape_function]") {
  const auto found = fit(kBatchesAndLengths, [](const ShapePoint& p) { return 24 * p[0] * p[1] * p[1]; });
  REQUIRE(found);
  CHECK(found->terms.size() == 1);
  CHECK(found->at({32, 1024}) == int64_t{24} * 32 * 1024 * 1024);
  CHECK(fit(kBatchesAndLengths, [](const ShapePoint& p) { return 8 * p[0] * p[1] + 4 * p[1]; })->at({3, 7}) == 196);
}

TEST_CASE("a size that no run confirms, and one that is rounded or chosen, is none", "[shape_function]") {
  CHECK_FALSE(fit({{4}, {16}}, [](const ShapePoint& p) { return 100 + 3 * p[0]; }));
  CHECK_FALSE(fit(kBatches, [](const ShapePoint& p) { return (p[0] + 31) / 32 * 32 * 100; }));
  CHECK_FALSE(fit(kBatches, [](const ShapePoint& p) { return p[0] > 50 ? 800 * p[0] : 300 * p[0]; }));
}

TEST_CASE("a polynomial is printed with its units", "[shape_function]") {
  const Polynomial polynomial{{{1761607680.0, {1, 0}}, {1041529569.0, {0, 0}}, {450888.0, {1, 1}}, {12.0, {1, 2}}}};
  const std::vector<std::string> names{"batch", "length"};
  CHECK(to_text(polynomial, names) == "0.97 GiB + 1.64 GiB·batch + 0.43 MiB·batch·length + 0.01 KiB·batch·length²");
}

}  // namespace oomdiag
