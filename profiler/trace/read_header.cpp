#include "profiler/trace/read_header.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "profiler/error.h"
#include "profiler/event.h"
#include "profiler/trace/event_file.h"
#include "profiler/trace/format.h"

namespace oomdiag {
namespace {

// A damaged header may say anything; these are some times what a recorder writes (TraceBudget).
constexpr uint64_t kMaxSlots = uint64_t{1} << 22;
constexpr uint64_t kMaxChunks = uint64_t{1} << 20;

}  // namespace

// Its atomics are those of another process, if any: here it is a copy, byte by byte.
void read_header(const InputFile& file, const std::filesystem::path& path, TraceHeader& header) {
  file.read(0, static_cast<void*>(&header), sizeof header);
  if (file.bytes() < sizeof header || std::memcmp(header.magic, kTraceMagic, sizeof kTraceMagic) != 0) {
    throw Error(ErrorKind::input, path.string() + " is not a trace of oomdiag",
                "give the folder oomdiag-<pid>, its trace, or a report.json");
  }
  if (header.version != kTraceVersion) {
    throw Error(ErrorKind::input, path.string() + " is a trace of version " + std::to_string(header.version) +
                                      "; this oomdiag reads version " + std::to_string(kTraceVersion));
  }
  constexpr uint64_t kLimit = uint64_t{1} << 46;  // keeps the sums below from overflowing
  const bool sane = header.header_bytes == kHeaderBytes && header.device_count <= kMaxDevices &&
                    header.names_offset < kLimit && header.names_bytes < kLimit && header.contexts_offset < kLimit &&
                    header.contexts_capacity < kLimit / sizeof(Context) && header.steps_offset < kLimit &&
                    header.kept_offset < kLimit && header.tables_offset < kLimit &&
                    header.slots_per_device < kMaxSlots && header.chunks_offset < kLimit &&
                    header.chunk_bytes > sizeof(ChunkHeader) && header.chunk_bytes < kLimit &&
                    header.chunk_bytes % sizeof(Event) == 0 && header.chunk_capacity < kMaxChunks;
  if (!sane) throw Error(ErrorKind::input, path.string() + " is damaged: its header makes no sense");
}

// A file is made as long as it may become, so one that is shorter was cut off. Only what was written is missed.
void check_length(const InputFile& file, const std::filesystem::path& path, const TraceHeader& header) {
  const uint64_t chunks = std::min<uint64_t>(header.chunk_count.load(), header.chunk_capacity);
  const uint64_t written = header.chunks_offset + chunks * header.chunk_bytes;
  if (file.bytes() >= written) return;
  throw Error(ErrorKind::input,
              path.string() + " is cut off: " + std::to_string(written - file.bytes()) + " of its " +
                  std::to_string(written) + " bytes are missing",
              "copy it again; it is sparse: tar -S and rsync -S keep it small");
}

}  // namespace oomdiag
