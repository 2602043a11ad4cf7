// view_block: where the tokens of a non-causal draft block read and write, for every row of a prepared step. Moves nothing.
//
// A warp has a token place. The places of a row have the same keys, but each warp reads the row itself: no warp waits for another.
#include "ring.cuh"

using namespace zos;

constexpr int WARP = 32;
constexpr int RECORD_INT4S = 4;  // (phase, seqlen_q, q_start, prompt_end), (swa_valid_start, kv_cached_end, generation, error), ...
constexpr int LANE_COLUMNS = 4;  // columns that a lane stores at once

struct Params {
    const int4* records;            // [capacity, 4]
    const int4* tickets;            // [num_rows]: (state_id, generation, q_start, seqlen_q), or (-1, reason, state_id or -1, 0)
    const int* num_kept;            // [num_rows] or null
    int2* kv_swa_index_offset_len;  // [num_places]: (ring offset, number of keys)
    int* kv_swa_index;              // [num_places, columns]
    int* swa_len;                   // [num_places]
    long long* positions;           // [num_places]
    long long* swa_write_slot;      // [num_places]
    int* token_row;                 // [num_places]
    int* token_state_id;            // [num_places]
    int capacity;
    int num_places;                 // num_rows * tokens_per_step
    int window;
    int tokens_per_step;
    int columns;                    // a multiple of LANE_COLUMNS
    Divisor ring;
};

struct Block {
    int state_id;  // -1: the row has none
    int start;     // position of its first token
    int begin;     // first position (inclusive) that its tokens see
};

__device__ __forceinline__ Block block_of_row(const Params& p, int row) {
    const Block none = {-1, 0, 0};
    const int4 ticket = p.tickets[row];
    const int state_id = ticket.x, q_start = ticket.z, q = ticket.w;
    if (q <= 0 || static_cast<unsigned>(state_id) >= static_cast<unsigned>(p.capacity)) return none;
    const int4* record = p.records + static_cast<long long>(state_id) * RECORD_INT4S;
    const int4 head = record[0], tail = record[1];
    if (tail.z != ticket.y || (head.x != LIVE && head.x != PAUSED)) return none;
    const bool prefilling = q_start < head.w;  // commit keeps all of a chunk
    const int kept = !p.num_kept ? 0 : prefilling ? q : p.num_kept[row];
    if (kept < 0 || kept > q || q_start < 0) return none;
    if (static_cast<long long>(q_start) + kept + p.tokens_per_step > INT32_LARGEST) return none;
    const int start = q_start + kept;
    if (tail.x > start) return none;
    return {state_id, start, window_begin(start - 1, p.window, tail.x)};
}

extern "C" __global__ void view_block(const __grid_constant__ Params p) {
    wait_for_predecessor();
    const int place = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (place >= p.num_places) return;
    const int row = place / p.tokens_per_step, ring = p.ring.divisor;
    const Block block = block_of_row(p, row);
    const bool live = block.state_id >= 0;
    const int position = block.start + place - row * p.tokens_per_step;
    const int first_slot = live ? block.state_id * ring : 0;
    const int slot = live ? ring_slot(block.begin, p.ring) : 0;
    const int length = live ? block.start + p.tokens_per_step - block.begin : 0;

    if (lane == 0) {
        p.kv_swa_index_offset_len[place] = {first_slot + slot, length};
        p.swa_len[place] = length;
        p.positions[place] = live ? position : 0;
        p.swa_write_slot[place] = live ? first_slot + ring_slot(position, p.ring) : -1;
        p.token_row[place] = live ? row : -1;
        p.token_state_id[place] = block.state_id;
    }
    int* index = p.kv_swa_index + static_cast<long long>(place) * p.columns;
    const auto slot_at = [&](int k) { return k < length ? first_slot + ring_advance(slot, k, ring) : -1; };
    for (int k = lane * LANE_COLUMNS; k < p.columns; k += WARP * LANE_COLUMNS)
        *reinterpret_cast<int4*>(index + k) = {slot_at(k), slot_at(k + 1), slot_at(k + 2), slot_at(k + 3)};
}
