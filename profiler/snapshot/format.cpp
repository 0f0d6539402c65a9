#include "profiler/snapshot/format.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <string_view>

#include "profiler/error.h"
#include "profiler/snapshot/packed.h"
#include "profiler/trace/format.h"

namespace oomdiag {
namespace {

constexpr size_t kHead = 4096;

std::string read_head(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw Error(ErrorKind::input, fmt::format("cannot read '{}'", file.string()));
  std::string head(kHead, '\0');
  stream.read(head.data(), static_cast<std::streamsize>(head.size()));
  if (stream.bad()) throw Error(ErrorKind::input, fmt::format("cannot read '{}'", file.string()));
  head.resize(static_cast<size_t>(stream.gcount()));
  return head;
}

/// Empty where it cannot be unpacked.
std::string read_packed_head(const std::filesystem::path& file) {
  UnpackedStream stream(file);
  std::string head(kHead, '\0');
  head.resize(static_cast<size_t>(stream.sgetn(head.data(), kHead)));
  return head;
}

std::string_view without_space(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  return begin == text.npos ? std::string_view() : text.substr(begin);
}

bool is_text(std::string_view head) {
  return std::ranges::all_of(
      head, [](char c) { return static_cast<unsigned char>(c) >= 0x20 || c == '\n' || c == '\t' || c == '\r'; });
}

struct Magic {
  std::string_view begin;
  const char* what;
};

constexpr std::array<Magic, 13> kMagics = {{{"PK\x03\x04", "a zip archive, as torch.save writes checkpoints"},
                                            {"<!DOCTYPE", "an HTML page; give the pickle that it was made from"},
                                            {"<!doctype", "an HTML page; give the pickle that it was made from"},
                                            {"<html", "an HTML page; give the pickle that it was made from"},
                                            {"\x7f"
                                             "ELF",
                                             "a program or shared library"},
                                            {"SQLite format 3", "an SQLite database, as Nsight Systems exports"},
                                            {"\x89PNG", "a PNG picture"},
                                            {"%PDF", "a PDF document"},
                                            {"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it first: zstd -d"},
                                            {"BZh", "compressed by bzip2; unpack it first: bunzip2"},
                                            {"\xfd"
                                             "7zXZ",
                                             "compressed by xz; unpack it first: unxz"},
                                            {"NSYS", "a report of Nsight Systems"},
                                            {"\x93NUMPY", "an array of NumPy"}}};

FileFormat format_of(std::string_view head) {
  const std::string_view text = without_space(head);
  if (text.empty()) return FileFormat::empty;
  if (head.starts_with(std::string_view(kTraceMagic, sizeof kTraceMagic))) return FileFormat::trace;
  if (head.starts_with('\x80')) return FileFormat::pickle;
  if (head.starts_with("\x1f\x8b")) return FileFormat::gzip;
  if (text.starts_with('[')) return FileFormat::timeline;
  if (!text.starts_with('{')) return FileFormat::other;
  // Of a host with many GPUs the events come late.
  const auto has = [&](std::string_view word) { return text.find(word) != text.npos; };
  return has("\"traceEvents\"") || has("\"deviceProperties\"") ? FileFormat::timeline : FileFormat::report;
}

}  // namespace

FileFormat find_format(const std::filesystem::path& file) { return format_of(read_head(file)); }

bool is_timeline(const std::filesystem::path& file) {
  const FileFormat format = find_format(file);
  return format == FileFormat::timeline ||
         (format == FileFormat::gzip && format_of(read_packed_head(file)) == FileFormat::timeline);
}

std::string describe_format(const std::filesystem::path& file) {
  const std::string head = read_head(file);
  const std::string_view text = without_space(head);
  for (const Magic& magic : kMagics) {
    if (head.starts_with(magic.begin) || text.starts_with(magic.begin)) return magic.what;
  }
  if (text.starts_with('{') && format_of(head) == FileFormat::timeline)
    return "a Chrome trace, as torch.profiler writes; all it contains is printed by oomdiag explain";
  if (text.starts_with('{')) {
    return text.find("\"oomdiag-report/") != text.npos ? "a report of oomdiag" : "JSON of another program";
  }
  if (text.starts_with('[')) {
    return "a JSON list, as torch.profiler's export_memory_timeline writes; all it contains is printed by oomdiag "
           "explain";
  }
  return is_text(head) ? "a text file" : "nothing that is known here";
}

}  // namespace oomdiag
