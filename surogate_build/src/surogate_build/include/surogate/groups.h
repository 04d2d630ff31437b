// Products of groups of rows by CUTLASS, for the SM90 alone: the workspace that they need. cutlass_groups.cuh places its parts.
#pragma once

#include "surogate/workspace.h"

namespace surogate {

// TMA descriptors, 128 bytes each: those of A and B, of a second pair, and for both groups of warps those of C and D, of each
// multiprocessor. Then of each group a shape, five pointers and five strides. Must match groups_bytes of
// surogate_core.api.compiled.
constexpr int64_t groups_bytes(int64_t groups) { return 160 * 8 * 128 + aligned(12 * groups) + 10 * aligned(8 * groups); }

}  // namespace surogate
