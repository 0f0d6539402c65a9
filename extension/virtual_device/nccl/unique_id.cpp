#include "extension/virtual_device/nccl/unique_id.h"

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string_view>

#include "extension/environment.h"
#include "extension/virtual_device/nccl/single_rank/job.h"
#include "profiler/trace/shared_file.h"

namespace oomdiag {
namespace {

constexpr size_t kTokenBytes = 16;
constexpr size_t kFolderBytes = sizeof(ncclUniqueId) - kTokenBytes;

uint64_t mix(uint64_t number) {  // the finisher of SplitMix64 (Steele, Lea, Flood, 2014): no two numbers become one
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9u;
  number = (number ^ (number >> 27)) * 0x94d049bb133111ebu;
  return number ^ (number >> 31);
}

std::string make_token() {
  std::random_device random;
  std::string token(kTokenBytes, '\0');
  for (char& byte : token) byte = static_cast<char>(random());
  return token;
}

std::string in_hex(std::string_view token) {
  std::string text;
  for (const char character : token) {
    const auto byte = static_cast<unsigned char>(character);
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string_view token_of(const ncclUniqueId& id) { return {id.internal, kTokenBytes}; }

std::string temporary_folder(std::string_view token) {
  const char* folder = variables::text("TMPDIR");
  const std::string name = "/oomdiag-nccl-" + in_hex(token);
  const std::string chosen = (*folder == '/' ? folder : "/tmp") + name;
  return chosen.size() < kFolderBytes ? chosen : "/tmp" + name;
}

std::string choose_folder() {
  const std::string chosen = variables::text(variables::kOutput) + std::string("/ranks");
  const bool is_usable = chosen.size() < kFolderBytes && chosen != "/ranks" && chosen.front() == '/';
  return is_usable ? chosen : temporary_folder(make_token());
}

std::string folder_of(const ncclUniqueId& id) {
  if (is_single_rank()) return job_file("");
  const std::string_view named(id.internal + kTokenBytes, kFolderBytes);
  const bool is_named = named.front() == '/' && named.find('\0') != named.npos;
  return is_named ? std::string(named.data()) : temporary_folder(token_of(id));
}

}  // namespace

ncclUniqueId make_unique_id() {
  ncclUniqueId id{};
  std::memcpy(id.internal, make_token().data(), kTokenBytes);
  const std::string folder = choose_folder();
  std::memcpy(id.internal + kTokenBytes, folder.data(), folder.size());
  return id;
}

ncclUniqueId derive_id(const ncclUniqueId& parent, int split, int color) {
  ncclUniqueId id = parent;
  uint64_t state = mix(static_cast<uint64_t>(static_cast<uint32_t>(split)) << 32 | static_cast<uint32_t>(color));
  for (int round = 0; round < 2; ++round) {  // after the second each word depends on all of the first
    for (size_t at = 0; at < kTokenBytes; at += sizeof state) {
      uint64_t word = 0;
      std::memcpy(&word, id.internal + at, sizeof word);
      state = mix(state + word + 0x9e3779b97f4a7c15u);
      std::memcpy(id.internal + at, &state, sizeof state);
    }
  }
  return id;
}

std::string shared_file(const ncclUniqueId& id, const std::string& what) {
  const std::string folder = folder_of(id);
  if (!is_single_rank() && !make_private_folder(folder.c_str())) return "";
  return folder + "/" + in_hex(token_of(id)) + "-" + what;
}

void leave_shared_folder(const ncclUniqueId& id) {
  if (!is_single_rank()) rmdir(folder_of(id).c_str());
}

}  // namespace oomdiag
