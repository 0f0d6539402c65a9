#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "extension/environment.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/locks.h"

namespace {

struct Note {
  const char* kind;
  const char* name;
};

// Never destroyed: a note may come from another library's destructor.
auto& lock = *new oomdiag::NotesLock;  // recursive: an observer may itself call something that is noted
auto& notes = *new std::vector<Note>;
void (*observer)(const char*, const char*) = nullptr;
bool is_recorded = false;  // there was an observer
std::atomic<void (*)(int, int64_t)> oom_observer = nullptr;

bool is_known(const char* kind, const char* name) {
  for (const Note& note : notes) {
    if (!std::strcmp(note.name, name) && !std::strcmp(note.kind, kind)) return true;
  }
  return false;
}

bool wants_log() { return oomdiag::variables::is_on(oomdiag::variables::kDeviceLog); }

/// A program without a recorder, as one that uses no torch is, hears here what was not served.
__attribute__((destructor)) void note_unserved() {
  if (oomdiag::is_forked_child())
    return;  // its parent writes it; and the lock may be held for ever, by a thread that is not here
  std::lock_guard guard(lock);
  if (is_recorded || wants_log()) return;
  for (const Note& note : notes) {
    if (std::strcmp(note.kind, "unsupported")) continue;
    std::fprintf(stderr, "oomdiag: the virtual device does not serve %s\n", note.name);
  }
}

}  // namespace

// In a forked child these do nothing, as note_unserved does.

void oomdiag_device_note(const char* kind, const char* name) {
  if (oomdiag::is_forked_child()) return;
  std::lock_guard guard(lock);
  if (is_known(kind, name)) return;
  notes.push_back({kind, name});
  if (wants_log()) std::fprintf(stderr, "oomdiag: virtual device: %s: %s\n", kind, name);
  if (observer) observer(kind, name);
}

void oomdiag_device_note_read() {
  if (oomdiag::is_forked_child()) return;
  std::lock_guard guard(lock);
  if (observer) observer("read", "");
}

void oomdiag_device_set_oom_observer(void (*on_oom)(int device, int64_t bytes)) { oom_observer = on_oom; }

void oomdiag_device_note_oom(int64_t bytes) {
  const oomdiag::Device* device = oomdiag::current_device();
  if (const auto on_oom = oom_observer.load()) on_oom(device ? device->ordinal : 0, bytes);
}

void oomdiag_device_set_observer(void (*on_note)(const char* kind, const char* name)) {
  if (oomdiag::is_forked_child()) return;
  std::lock_guard guard(lock);
  observer = on_note;
  is_recorded = is_recorded || on_note;
  for (size_t i = 0; on_note && i < notes.size(); ++i) on_note(notes[i].kind, notes[i].name);
}
