#pragma once

namespace oomdiag {

/// Loads liboomdiag_forget.so beside this library once torch is in the process. Without it the contents of blocks
/// cannot be distinguished from those of their last owners, and none are kept.
void load_forgetting() noexcept;

/// Lets it attach itself to the caching allocator: called before every allocation, cheap once that is settled.
void poll_forgetting() noexcept;

}  // namespace oomdiag
