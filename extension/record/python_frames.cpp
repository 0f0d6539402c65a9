#include "extension/record/python_frames.h"

#include <cstdio>

#include "extension/python_symbols.h"
#include "extension/record/python_api.h"

namespace oomdiag {

namespace {

constexpr size_t kWordsOfThread = 32;  // of the thread state that are looked at; it is twice as large
constexpr size_t kThroughFrame =
    7;                    // 3.11, 3.12: PyThreadState::cframe, which lies on the stack of C++ or in the state
constexpr int kHops = 4;  // to the caller's frame: 3.12 puts frames of its own between

/// Whether reading a few words there is safe, of a pointer that ought to lead to this thread's stack.
bool is_near(const void* pointer, const void* place, intptr_t bytes) {
  const auto distance = reinterpret_cast<intptr_t>(pointer) - reinterpret_cast<intptr_t>(place);
  return distance > -bytes && distance < bytes && distance % static_cast<intptr_t>(sizeof(void*)) == 0;
}

}  // namespace

bool PythonFrames::choose_layout() noexcept {
  int major = 0;
  int minor = 0;
  if (std::sscanf(python_symbols::version(), "%d.%d", &major, &minor) != 2 || major != 3) return false;
  if (minor < 11 || minor > 14) return false;
  layout_ = {.code = minor == 11 ? 4u : 0u,
             .previous = minor == 11 ? 6u : 1u,
             .instruction = 7,
             .local = minor == 14 ? 10u : 9u};
  return true;
}

bool PythonFrames::find_current(const Word* thread, const Word* frame) noexcept {
  const auto* searched = reinterpret_cast<Word>(frame);
  through_ = 0;
  for (at_ = 3; at_ < kWordsOfThread; ++at_) {
    if (thread[at_] == searched) return true;
  }
  through_ = kThroughFrame;
  const Word holder = thread[through_];
  if (!is_near(holder, &searched, 16 << 20) && !is_near(holder, thread, 4096)) return false;
  for (at_ = 0; at_ < 2; ++at_) {
    if (reinterpret_cast<const Word*>(holder)[at_] == searched) return true;
  }
  return false;
}

/// Whether `frame` says of its code and instruction what the C API says of `object`.
bool PythonFrames::agrees(const PythonApi& api, const Word* frame, PythonObject object) noexcept {
  const PythonRef code(api, api.frame_code(object));
  if (plain(frame[layout_.code]) != code.get()) return false;
  const intptr_t first = frame[layout_.instruction] - plain(frame[layout_.code]) - api.frame_instruction(object);
  if (first_instruction_ == 0) first_instruction_ = first;
  return first == first_instruction_ && first > 0 && first < 1024;
}

void PythonFrames::measure(const PythonApi& api) noexcept {
  const PythonRef object = PythonRef::borrowed(api, api.frame());
  if (known() || !object || !choose_layout()) return;
  const PythonRef type(api, api.type(object.get()));
  const PythonRef caller(api, api.frame_back(object.get()));
  // PyFrameObject: references, type, f_back, f_frame; another build of Python may have more before.
  const auto frame_of = [&](const PythonRef& of) {
    return reinterpret_cast<const Word*>(static_cast<const Word*>(of.get())[3]);
  };
  if (!caller || static_cast<const Word*>(object.get())[1] != type.get()) return;
  const Word* frame = frame_of(object);
  first_instruction_ = 0;
  if (frame == nullptr || !agrees(api, frame, object.get())) return;
  if (!find_current(static_cast<const Word*>(api.this_thread()), frame)) return;
  const Word* outer = frame;
  for (int hop = 0; hop < kHops && outer != nullptr && outer != frame_of(caller); ++hop) {
    outer = reinterpret_cast<const Word*>(outer[layout_.previous]);
  }
  if (outer == nullptr || outer != frame_of(caller) || !agrees(api, outer, caller.get())) return;
  known_.store(true, std::memory_order_release);
}

}  // namespace oomdiag
