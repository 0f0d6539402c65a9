#include "extension/cupti/card_watch.h"

#include <unistd.h>

#include <algorithm>

namespace oomdiag {

constexpr int kMostModuleSteps = 512;  // of each card; what later modules take is unexplained

void CardWatch::before_context(uint8_t device) {
  Card& card = cards_[device];
  if (card.has_context || card.before.valid) return;
  card.before = meter_.read(device);
  if (!card.before.valid) return;
  remember(device, card.before);
  const int64_t at_start = meter_.used_at_start(device);
  if (at_start >= 0) write_step(device, card.used_bytes - at_start, "cuInit");
}

// The process that NVML lists since the context is there is ours: in a container its pid is another one than getpid's.
void CardWatch::after_context(uint8_t device, bool is_whole) {
  Card& card = cards_[device];
  if (card.has_whole_context) return;
  card.has_context = true;
  card.has_whole_context = is_whole;
  const CardReading after = meter_.read(device);
  if (!after.valid || !card.before.valid) return;
  for (const ProcessOnCard& one : after.listed()) {
    if (!card.before.lists(one.pid) && card.own_pid == 0) card.own_pid = one.pid;
  }
  take_step(device, after, "context");
  write_processes(device, after);
}

void CardWatch::after_module(uint8_t device, uint16_t asker) {
  Card& card = cards_[device];
  if (!card.before.valid || card.module_steps >= kMostModuleSteps) return;
  const CardReading now = meter_.read(device);
  if (!now.valid) return;
  ++card.module_steps;
  const char* name = outlet_.askers().name(asker);
  take_step(device, now, std::string("modules of ") + (*name == '\0' ? "an unknown library" : name));
}

void CardWatch::attach(uint8_t device) {
  TraceHeader& header = outlet_.writer()->header();
  if (device >= header.device_count || virtual_device_ || cards_[device].own_bytes == 0) return;
  header.devices[device].context_bytes = cards_[device].own_bytes;
}

// What the card lost since the last reading and neither the books nor other processes took.
void CardWatch::take_step(uint8_t device, const CardReading& now, const std::string& name) {
  Card& card = cards_[device];
  const int64_t used = card.used_bytes;
  const int64_t known = card.others_bytes + card.driver_bytes;
  remember(device, now);
  const int64_t step = (card.used_bytes - used) - (card.others_bytes + card.driver_bytes - known);
  if (step <= 0) return;
  card.own_bytes += step;
  write_step(device, step, name);
  if (outlet_.writer() != nullptr) attach(device);
}

void CardWatch::remember(uint8_t device, const CardReading& now) {
  Card& card = cards_[device];
  card.used_bytes = now.used_bytes;
  card.driver_bytes = books_.card_bytes(device);
  card.others_bytes = 0;
  for (const ProcessOnCard& one : now.listed()) {
    if (one.pid != card.own_pid) card.others_bytes += one.bytes;
  }
}

void CardWatch::write_step(uint8_t device, int64_t bytes, const std::string& name) {
  Event event = outlet_.make(EventKind::card_step);
  event.device = device;
  event.address = static_cast<uint64_t>(cards_[device].used_bytes);
  event.bytes = std::max<int64_t>(0, bytes);
  outlet_.write(event, 0, name);
}

// Where we cannot tell ourselves from the others, nobody is accused.
void CardWatch::write_processes(uint8_t device, const CardReading& reading) {
  Card& card = cards_[device];
  const auto our_pid = static_cast<uint32_t>(getpid());
  if (card.own_pid == 0 && reading.lists(our_pid)) card.own_pid = our_pid;
  if (!reading.valid || (card.own_pid == 0 && reading.process_count > 0)) return;
  Event first = outlet_.make(EventKind::card_process);
  first.device = device;
  first.flags = kFirstProcess;
  outlet_.write(first, 0, {});
  for (const ProcessOnCard& one : reading.listed()) {
    if (one.pid == card.own_pid) continue;
    char name[64];
    name_process(one.pid, name, sizeof name);
    Event event = outlet_.make(EventKind::card_process);
    event.device = device;
    event.address = one.pid;
    event.bytes = one.bytes;
    outlet_.write(event, 0, name);
  }
}

}  // namespace oomdiag
