#pragma once

/// Marks a function that users of the mocked library call: C linkage and visible, where everything else is hidden.
#define OOMDIAG_ENTRY_POINT extern "C" __attribute__((visibility("default")))
