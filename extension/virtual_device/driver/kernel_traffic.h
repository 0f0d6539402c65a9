#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace oomdiag {

/// How often a kernel goes over what one of its arguments points to, to read it or to write it.
struct Passes {
  int loops = 0;                ///< that do so: each takes all of it, however many threads share in that
  int64_t bytes_of_thread = 0;  ///< outside of loops, at most
};

struct ArgumentTraffic {
  Passes reads{}, writes{};
};

/// What a kernel's code says of its traffic with the GPU's memory.
struct KernelTraffic {
  std::vector<ArgumentTraffic> arguments{};  ///< by their place; without passes for what is no pointer
  bool computes_products = false;            ///< on tensor cores: how many its code does not say
  bool is_complete = true;                   ///< false: copies by tensor maps, whose shape the host gives
};

/// Of each kernel that a PTX module defines (PTX ISA). An instruction is taken to be one line, as LLVM and nvcc write them.
std::map<std::string, KernelTraffic> read_kernel_traffic(std::string_view ptx);

}  // namespace oomdiag
