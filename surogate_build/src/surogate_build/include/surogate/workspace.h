// Layout of workspaces: every part begins at a multiple of `workspace_alignment` bytes.
#pragma once

#include <cstdint>

namespace surogate {

constexpr int64_t workspace_alignment = 256;

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Returns `bytes` rounded up to a multiple of the alignment.
constexpr int64_t aligned(int64_t bytes) { return round_up(bytes, workspace_alignment); }

}  // namespace surogate
