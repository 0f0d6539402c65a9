#include "extension/virtual_device/dnn/shared_tiles.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>

#include "extension/virtual_device/dnn/real.h"

namespace oomdiag {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

struct ClusterSize {
  int64_t blocks;   ///< of a cluster
  int64_t at_once;  ///< of all clusters, that run on 132 multiprocessors, one on each
};
constexpr ClusterSize kClusterSizes[] = {{1, 132}, {2, 132}, {3, 117}, {4, 120}, {5, 110}, {6, 96}, {8, 120}};
constexpr int64_t kDescribedAtOnce = 18;

/// Among how many blocks a tile is shared at most, where so many run at once for each. A part has eight steps along the inner dimension, or
/// more. Half precision has another rule: of the tiles that are left after whole waves two blocks share one. 0 where it is not known.
int64_t find_parts_of_tile(const ConvolutionProduct& product, int64_t blocks_of_tile, bool is_rest) {
  constexpr int64_t kMaxParts = 128, kLeastSteps = 8, kStepBytes = 128, kManySteps = 1000;
  const bool is_half = product.element_bytes < 4;
  const int64_t steps = product.inner * product.element_bytes / kStepBytes;
  const int64_t most = std::max<int64_t>(1, std::min({blocks_of_tile, kMaxParts, steps / kLeastSteps}));
  if (is_half && is_rest) return std::min<int64_t>(2, most);
  return is_half && most > 1 && steps < kManySteps ? 0 : most;
}

/// Parts of all tiles that have one in the workspace; none where the rule is not known.
std::optional<int64_t> count_parts(const ConvolutionProduct& product, int64_t tiles, int64_t at_once) {
  const bool is_rest = tiles > at_once;
  const int64_t shared = is_rest ? tiles % at_once : tiles;
  if (shared == 0) return 0;
  const int64_t parts = find_parts_of_tile(product, at_once / shared, is_rest);
  if (parts == 0) return std::nullopt;
  return parts > 1 ? shared * parts : 0;
}

/// What a plan wants beside the parts of tiles: room for the tensors in another layout, or almost nothing, where they lie as the kernel wants.
/// None where `bytes` is neither.
std::optional<int64_t> find_layout_bytes(const ConvolutionProduct& product, int64_t bytes) {
  constexpr int64_t kBesides = 16, kMaxFlags = 2048;
  for (const int64_t wanted : {product.tensor_bytes, int64_t{0}}) {
    if (bytes >= wanted && bytes < wanted + kMaxFlags) return bytes < kBesides ? bytes : wanted + kBesides;
  }
  return std::nullopt;
}

/// A part has a flag; that of all plans is right to 256 bytes.
int64_t bytes_of_parts(int64_t parts, int64_t tile_bytes) {
  constexpr int64_t kFlagBytes = 4, kMoreFlags = 8, kPadding = 127;
  return parts > 0 ? parts * tile_bytes + kFlagBytes * (parts + kMoreFlags) + kPadding : 0;
}

template <typename T>
bool read(cudnnBackendDescriptor_t from, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, T* value,
          int64_t most = 1, int64_t* count = nullptr) {
  int64_t given = 0;
  const auto get = OOMDIAG_REAL(cudnnBackendGetAttribute);
  const bool is_read = get(from, name, type, most, &given, value) == CUDNN_STATUS_SUCCESS && given > 0;
  if (count != nullptr) *count = std::min(given, most);
  return is_read;
}

/// Descriptors to read others into; they go with it.
template <size_t N>
struct Copies {
  std::array<cudnnBackendDescriptor_t, N> all{};

  explicit Copies(cudnnBackendDescriptorType_t type) {
    for (auto& one : all) OOMDIAG_REAL(cudnnBackendCreateDescriptor)(type, &one);
  }
  ~Copies() {
    for (auto one : all) OOMDIAG_REAL(cudnnBackendDestroyDescriptor)(one);
  }
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
};

/// What CUDNN_KNOB_TYPE_TILE_SIZE stands for, by the workspaces that an H200 gave.
bool set_tile(int64_t choice, BlockShape* block) {
  struct Tile {
    int64_t choice, rows, columns;
  };
  constexpr Tile kTiles[] = {{0, 128, 128}, {1, 128, 64}, {4, 256, 64}, {5, 64, 64}, {7, 64, 128}};
  const auto* const tile =
      std::find_if(std::begin(kTiles), std::end(kTiles), [&](const Tile& one) { return one.choice == choice; });
  if (tile == std::end(kTiles)) return false;
  block->rows = tile->rows;
  block->columns = tile->columns;
  return true;
}

}  // namespace

int64_t find_workspace_of_shared_tiles(const ConvolutionProduct& product, const BlockShape& block, int64_t bytes) {
  const int64_t of_cluster = block.cluster_rows * block.cluster_columns;
  const auto* const cluster = std::find_if(std::begin(kClusterSizes), std::end(kClusterSizes),
                                           [&](const ClusterSize& one) { return one.blocks == of_cluster; });
  const bool is_known = product.element_bytes == 4 || product.element_bytes == 2;
  if (cluster == std::end(kClusterSizes) || !is_known) return bytes;
  const int64_t rows = round_up(divide_up(product.rows, block.rows), block.cluster_rows);
  const int64_t columns =
      round_up(product.column_blocks * divide_up(product.columns, block.columns), block.cluster_columns);
  const int64_t tile_bytes = 4 * block.rows * block.columns;
  const auto described = count_parts(product, rows * columns, kDescribedAtOnce / of_cluster * of_cluster);
  const auto real = count_parts(product, rows * columns, cluster->at_once);
  if (!described || !real || (*described == 0 && *real == 0)) return bytes;
  const auto layout = find_layout_bytes(product, bytes - *described * tile_bytes);
  return layout ? *layout + bytes_of_parts(*real, tile_bytes) : bytes;
}

bool read_block_shape(cudnnBackendDescriptor_t plan, BlockShape* block) {
  constexpr int64_t kMaxKnobs = 32;
  Copies<1> choice(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  Copies<kMaxKnobs> knobs(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
  int64_t count = 0;
  if (!read(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, choice.all.data()))
    return false;
  if (!read(choice.all[0], CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, knobs.all.data(),
            kMaxKnobs, &count))
    return false;
  bool has_tile = false, may_share = false;
  for (int64_t i = 0; i < count; ++i) {
    const cudnnBackendDescriptor_t knob = knobs.all[static_cast<size_t>(i)];
    cudnnBackendKnobType_t type{};
    int64_t value = 0;
    if (!read(knob, CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, &type)) return false;
    if (!read(knob, CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, &value)) return false;
    if (type == CUDNN_KNOB_TYPE_TILE_SIZE) has_tile = set_tile(value, block);
    if (type == CUDNN_KNOB_TYPE_WORKSPACE) may_share = value == 0;
    if (type == CUDNN_KNOB_TYPE_TILE_CGA_M) block->cluster_rows = value;
    if (type == CUDNN_KNOB_TYPE_TILE_CGA_N) block->cluster_columns = value;
  }
  return has_tile && may_share;
}

}  // namespace oomdiag
