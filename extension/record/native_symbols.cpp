#include "extension/record/native_symbols.h"

#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <span>

namespace oomdiag {

namespace {

/// A file in memory, read only. Everything in it is checked before it is followed.
class ElfFile {
 public:
  explicit ElfFile(const char* path) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    struct stat facts {};
    if (fstat(file, &facts) == 0 && facts.st_size > 0) {
      size_ = static_cast<size_t>(facts.st_size);
      data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    }
    close(file);
  }
  ~ElfFile() {
    if (data_ != MAP_FAILED) munmap(data_, size_);
  }
  ElfFile(const ElfFile&) = delete;
  ElfFile& operator=(const ElfFile&) = delete;

  template <class T>
  std::span<const T> read(uint64_t offset, uint64_t count) const {
    if (data_ == MAP_FAILED || offset > size_ || count > (size_ - offset) / sizeof(T) || offset % alignof(T) != 0)
      return {};
    return {reinterpret_cast<const T*>(static_cast<const char*>(data_) + offset), count};
  }

 private:
  void* data_ = MAP_FAILED;
  size_t size_ = 0;
};

std::span<const Elf64_Shdr> read_sections(const ElfFile& file, bool& is_fixed) {
  const auto header = file.read<Elf64_Ehdr>(0, 1);
  if (header.empty() || std::memcmp(header[0].e_ident, ELFMAG, SELFMAG) != 0) return {};
  if (header[0].e_ident[EI_CLASS] != ELFCLASS64) return {};
  is_fixed = header[0].e_type == ET_EXEC;
  return file.read<Elf64_Shdr>(header[0].e_shoff, header[0].e_shnum);
}

}  // namespace

std::string find_local_symbol(const Dl_info& found, const void* address) {
  const bool is_program = std::strchr(found.dli_fname, '/') == nullptr;
  const ElfFile file(is_program ? "/proc/self/exe" : found.dli_fname);
  bool is_fixed = false;  // linked to an address: not moved when it was loaded
  const auto sections = read_sections(file, is_fixed);
  const uint64_t base = is_fixed ? 0 : reinterpret_cast<uint64_t>(found.dli_fbase);
  const uint64_t offset = reinterpret_cast<uint64_t>(address) - base;
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != SHT_SYMTAB || section.sh_link >= sections.size()) continue;
    const Elf64_Shdr& texts = sections[section.sh_link];
    const auto characters = file.read<char>(texts.sh_offset, texts.sh_size);
    for (const Elf64_Sym& symbol : file.read<Elf64_Sym>(section.sh_offset, section.sh_size / sizeof(Elf64_Sym))) {
      const bool is_function = ELF64_ST_TYPE(symbol.st_info) == STT_FUNC;
      if (!is_function || offset < symbol.st_value || offset - symbol.st_value >= symbol.st_size) continue;
      if (symbol.st_name >= characters.size()) continue;
      const auto name = characters.subspan(symbol.st_name);
      return {name.data(), strnlen(name.data(), name.size())};
    }
  }
  return {};
}

}  // namespace oomdiag
