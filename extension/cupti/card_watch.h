#pragma once

#include <array>
#include <string>

#include "extension/cupti/card_meter.h"
#include "extension/cupti/driver_books.h"
#include "extension/cupti/outlet.h"

namespace oomdiag {

/// The part of the story that no call of the driver tells: what a context and its modules take, by steps of used memory, and
/// which other processes hold the card. Calls must not overlap.
class CardWatch {
 public:
  CardWatch(const DriverBooks& books, Outlet& outlet, bool virtual_device)
      : books_(books), outlet_(outlet), virtual_device_(virtual_device) {
    meter_.open();
  }

  /// The first reading of a card. What it lost since the start, when nobody had asked for a context, is cuInit's.
  void before_context(uint8_t device);
  /// Comes twice: when CUPTI tells that the context is there, and when the call that made it returns.
  void after_context(uint8_t device, bool is_whole);
  /// A context that was there before us took its bytes unseen.
  void skip_context(uint8_t device) { cards_[device].has_context = cards_[device].has_whole_context = true; }
  /// Code was loaded, for the shared object with this number.
  void after_module(uint8_t device, uint16_t asker);

  /// Writes who else holds the card, as NVML has it now.
  void write_processes(uint8_t device) { write_processes(device, meter_.read(device)); }
  /// Once there is a trace: what was measured before goes into its header.
  void attach(uint8_t device);

 private:
  struct Card {
    bool has_context = false;
    bool has_whole_context = false;  ///< the call that makes it has returned
    CardReading before;              ///< before there was a context; not valid if that was before us
    int64_t used_bytes = 0;          ///< at the last reading
    int64_t others_bytes = 0;        ///< of it other processes'
    int64_t driver_bytes = 0;        ///< of it what the books had then
    int64_t own_bytes = 0;           ///< context and modules: what was measured so far
    uint32_t own_pid = 0;            ///< ours, as NVML numbers it: it may live outside of our container
    int module_steps = 0;
  };

  void take_step(uint8_t device, const CardReading& now, const std::string& name);
  void remember(uint8_t device, const CardReading& now);
  void write_step(uint8_t device, int64_t bytes, const std::string& name);
  void write_processes(uint8_t device, const CardReading& reading);

  const DriverBooks& books_;
  Outlet& outlet_;
  bool virtual_device_;
  CardMeter meter_;
  std::array<Card, kMaxDevices> cards_{};
};

}  // namespace oomdiag
