// What decode_metadata.cu and the floors it is measured against (floor.cu) share: the launch parameters and the record's layout.
#pragma once
#include "ring.cuh"

namespace zos {

constexpr int WARP = 32;
constexpr int MAX_WARPS = 32;
constexpr int MAX_ROWS_PER_BLOCK = 32;  // one lane each where a warp sums them
constexpr unsigned ALL_LANES = 0xffffffffu;
// Words of a place in this file and of what it launches (docs/design.md): a *place* is an index into the outputs by token. A packed
// batch puts rows one after the other, a strided one gives each row tokens_per_step places. A row that would end past the last
// place is *deferred*: padding this step, as is every later row. A row is *live* when it has places, no error, and fits.
// The record's layout is that of COLUMNS in zos/table.py.
constexpr int RECORD_INT4S = 4;  // a record is 16 int32: (phase, seqlen_q, q_start, prompt_end), (swa_valid_start, kv_cached_end,
                                 // generation, error), (head, stop_at, chunk_q, decode_q), (error_value, -, -, -)
constexpr int RECORD_VALID_START = 4, RECORD_ERROR = 7, RECORD_ERROR_VALUE = 12;
constexpr int COUNTER_DEFERRED = 2, COUNTER_ERRORS = 3;

constexpr int MAX_COMPRESSIONS = 16;

struct Compression {
    Divisor ratio;    // tokens per entry
    Divisor entries;  // of the ring
};

struct Params {
    int* records;                          // [capacity, 16]
    const int* state_ids;                  // [num_rows]
    const long long* token_ids;            // [capacity, tokens_per_step] or null
    int2* kv_swa_index_offset_len;         // [num_places]: (ring offset, window length)
    int* kv_swa_index;                     // [num_places, window]
    int4* kv_swa_full_index_pivots;        // [num_places]: (section 1 start, length, section 2 start, length)
    int* swa_len;                          // [num_places]
    long long* positions;                  // [num_places]
    long long* input_ids;                  // [num_places] or null
    long long* swa_write_slot;             // [num_places]
    int* token_row;                        // [num_places]
    int* token_state_id;                   // [num_places]
    int* cu_seqlens_q;                     // [num_rows + 1]
    int* seqlens_q;                        // [num_rows]
    int* seqlens_k;                        // [num_rows]
    int* num_tokens;                       // [1]
    long long* compression_write_slot;     // [num_compressions, compression_stride]
    long long* compression_index;          // [num_compressions, compression_stride]
    int4* tickets;                         // [num_rows]: (state_id, generation, q_start, seqlen_q)
    unsigned long long* counters;          // [4]: stale, duplicate, deferred, errors
    int* chunk_places;                     // [ceil(num_rows / rows_per_chunk)]: token places of each chunk of rows
    long long compression_stride;
    int capacity;
    int num_rows;
    int num_places;                        // T: token places of the step
    int window;
    int tokens_per_step;
    int num_compressions;
    int rows_per_chunk;                    // 0: no chunk sums, blocks sum every row before theirs
    int packed;
    int vector_index;                      // kv_swa_index may be written 16 bytes at a time
    Divisor ring;
    Compression compressions[MAX_COMPRESSIONS];
};

__device__ __forceinline__ int4 record_part(const Params& p, int state_id, int part) {
    return reinterpret_cast<const int4*>(p.records)[static_cast<long long>(state_id) * RECORD_INT4S + part];
}

// State id of a row, -1 for every id that names no state.
__device__ __forceinline__ int state_of_row(const Params& p, int row) {
    const int state_id = p.state_ids[row];
    return static_cast<unsigned>(state_id) < static_cast<unsigned>(p.capacity) ? state_id : -1;
}

}  // namespace zos
