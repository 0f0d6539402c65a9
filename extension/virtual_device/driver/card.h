#pragma once

#include <cstdint>
#include <string>

namespace oomdiag {

/// What a card says of itself, read from a data file of `extension/virtual_device/cards`, where each number has its
/// source.
struct Card {
  std::string name;
  int64_t total_bytes = 0;  ///< as cudaDeviceProp::totalGlobalMem has it, less than is printed on the box
  int compute_major = 0;
  int compute_minor = 0;
  int multiprocessors = 0;
  int threads_per_multiprocessor = 0;
  int blocks_per_multiprocessor = 0;
  int registers_per_multiprocessor = 0;
  int shared_bytes_per_multiprocessor = 0;
  int shared_bytes_per_block = 0;
  int shared_bytes_per_block_optin = 0;
  int reserved_shared_bytes_per_block = 0;
  int l2_bytes = 0;
  int clock_khz = 0;
  int memory_clock_khz = 0;
  int memory_bus_bits = 0;
  int64_t context_bytes = 0;       ///< taken when the context is made
  int64_t first_kernel_bytes = 0;  ///< taken by the first kernel or library handle
};

/// The card in the JSON file `path`. Throws std::runtime_error with a line for the user: unreadable, no JSON, a missing
/// or absurd number.
Card read_card(const std::string& path);

/// The newest of `architectures` ("75,80,86,90") that is not above the card: the code a kernel of that build runs.
/// CUB sizes its scratch space by it; the card's own capability when none fits.
int pick_architecture(const Card& card, const std::string& architectures);

/// The card as cuDNN wants a device described, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION; keys as published in
/// openxla/xla, target_config/cudnn_device_props.cc. The compute capability decides; the clocks changed no answer.
std::string describe_for_cudnn(const Card& card);

}  // namespace oomdiag
