// What a kernel of your own needs in place of `kv_swa_index`: the slots of a query's keys, from its two int32 of
// `kv_swa_index_offset_len`. Compile with `-I` and what `zos.get_include()` returns; also plain C++17.
#pragma once
#include "ring.cuh"

// Slot (state_id * R + position % R) of a query's k-th key, oldest first, 0 <= k < its window length. `offset`: of the oldest.
ZOS_HD int key_slot(int offset, int k, zos::Divisor ring) {
    const int slot = zos::remainder(offset, ring);
    return offset - slot + zos::ring_advance(slot, k, ring.divisor);
}
