#include "extension/virtual_device/driver/code.h"

#include <elf.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "extension/virtual_device/driver/host_memory.h"
#include "extension/virtual_device/driver/kernel_traffic.h"
#include "extension/virtual_device/driver/launch_observer.h"

namespace oomdiag {
namespace {

constexpr uint32_t kFatBinary = 0xBA55ED50;   // as LLVM's offload tools name it
constexpr uint32_t kFatWrapper = 0x466243B1;  // fatbinary_section.h, FATBINC_MAGIC
constexpr uint32_t kBitcode = 0xDEC04342;     // "BC", LLVM's bitcode: what links at run time

const char* at(const void* image, uint64_t offset) { return static_cast<const char*>(image) + offset; }

template <typename Record>
Record record_at(const void* image, uint64_t offset) {
  Record record;
  std::memcpy(&record, at(image, offset), sizeof record);
  return record;
}

/// Adds what a symbol table of a cubin names: its functions, and the variables that it defines.
void read_symbols(const void* image, const Elf64_Shdr& table, const Elf64_Shdr& strings, CodeNames& names) {
  for (uint64_t place = 0; place + sizeof(Elf64_Sym) <= table.sh_size; place += sizeof(Elf64_Sym)) {
    const auto symbol = record_at<Elf64_Sym>(image, table.sh_offset + place);
    if (symbol.st_name >= strings.sh_size || symbol.st_shndx == SHN_UNDEF) continue;
    const char* name = at(image, strings.sh_offset + symbol.st_name);
    if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC) names.kernels.emplace(name);
    if (ELF64_ST_TYPE(symbol.st_info) == STT_OBJECT) names.globals[name] = static_cast<int64_t>(symbol.st_size);
  }
}

/// The names of a cubin; nullopt where its tables are not as ELF has them.
std::optional<CodeNames> read_cubin(const void* image) {
  const auto header = record_at<Elf64_Ehdr>(image, 0);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_shentsize != sizeof(Elf64_Shdr)) return std::nullopt;
  const auto section = [&](uint64_t number) {
    return record_at<Elf64_Shdr>(image, header.e_shoff + number * sizeof(Elf64_Shdr));
  };
  if (!can_read(at(image, header.e_shoff), header.e_shnum * sizeof(Elf64_Shdr))) return std::nullopt;
  std::optional<CodeNames> names;
  for (uint64_t i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr table = section(i);
    if (table.sh_type != SHT_SYMTAB || table.sh_link >= header.e_shnum) continue;
    const Elf64_Shdr strings = section(table.sh_link);
    const bool is_there =
        can_read(at(image, table.sh_offset), table.sh_size) && can_read(at(image, strings.sh_offset), strings.sh_size);
    if (!is_there) return std::nullopt;
    if (!names) names.emplace();
    read_symbols(image, table, strings, *names);
  }
  return names;
}

bool holds(const std::filesystem::path& file, const void* image) {
  std::ifstream stream(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  return !bytes.empty() && can_read(image, bytes.size()) && std::memcmp(bytes.data(), image, bytes.size()) == 0;
}

/// The PTX that Triton keeps beside a cubin in its cache, of which this is the image with such a kernel; empty if it has none.
std::string find_ptx_of_triton(const void* image, const std::string& kernel) {
  const char* const cache = std::getenv("TRITON_CACHE_DIR");
  if (cache == nullptr) return {};
  std::error_code error;
  for (const auto& folder : std::filesystem::directory_iterator(cache, error)) {
    if (!holds(folder.path() / (kernel + ".cubin"), image)) continue;
    std::ifstream stream(folder.path() / (kernel + ".ptx"));
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  return {};
}

/// Of the first kernel of which there is PTX.
std::map<std::string, KernelTraffic> read_traffic_of_cubin(const void* image, const CodeNames& names) {
  for (const std::string& kernel : names.kernels) {
    if (const std::string ptx = find_ptx_of_triton(image, kernel); !ptx.empty()) return read_kernel_traffic(ptx);
  }
  return {};
}

}  // namespace

CUresult read_code(const void* image, Code& code) {
  if (!image || !can_read(image, sizeof(uint32_t))) return CUDA_ERROR_INVALID_VALUE;
  code = {};
  const auto magic = record_at<uint32_t>(image, 0);
  if (std::memcmp(image, ELFMAG, SELFMAG) == 0) {
    if (!can_read(image, sizeof(Elf64_Ehdr))) return CUDA_ERROR_INVALID_IMAGE;
    code.names = read_cubin(image);
    if (launches_are_watched() && code.names) code.traffic = read_traffic_of_cubin(image, *code.names);
    return CUDA_SUCCESS;
  }
  if (magic == kFatBinary || magic == kFatWrapper || magic == kBitcode) return CUDA_SUCCESS;
  const std::string_view text(static_cast<const char*>(image));
  if (!begins_as_ptx(text)) return CUDA_ERROR_INVALID_IMAGE;
  code.names = read_ptx(text);
  if (launches_are_watched()) code.traffic = read_kernel_traffic(text);
  return CUDA_SUCCESS;
}

std::string write_code(const Code& code) {
  std::string text;
  if (!code.names) return {reinterpret_cast<const char*>(&kFatBinary), sizeof kFatBinary};
  text = ".version 1.0\n";
  for (const std::string& name : code.names->kernels) text += ".visible .entry " + name + "() { ret; }\n";
  for (const auto& [name, bytes] : code.names->globals) {
    text += ".visible .global .b8 " + name + "[" + std::to_string(bytes) + "];\n";
  }
  return text;
}

CUresult read_code_file(const char* path, Code& code) {
  std::ifstream file(path ? path : "", std::ios::binary);
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  bytes.resize(bytes.size() + sizeof(uint64_t));  // text ends with 0, as in memory
  return read_code(bytes.data(), code);
}

}  // namespace oomdiag
