// What the two prepares (and floor.cu) share: launch parameters, the record's layout, judging a row, writing a token's scalars.
#pragma once
#include "ring.cuh"

namespace zos {

constexpr int WARP = 32;
constexpr int MAX_WARPS = 32;
constexpr int MAX_ROWS_PER_BLOCK = 32;  // one lane each where a warp sums them
constexpr unsigned ALL_LANES = 0xffffffffu;
// Words of a place here and in what is launched (docs/design.md): a *place* is an index into the outputs by token. A packed batch
// puts rows one after the other, a strided one gives each row tokens_per_step places. A row that would end past the last place is
// *deferred*: padding this step, as is every later row. A row is *live* when it has places, no error, and fits.
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
    int4* tickets;                         // [num_rows]: (state_id, generation, q_start, seqlen_q), or (-1, reason, state_id or -1, 0)
    unsigned long long* counters;          // [4]: stale, duplicate, deferred, errors
    int* chunk_places;                     // [ceil(num_rows / rows_per_chunk)]: token places of each chunk of rows (decode)
    int4* swa_load_plan;                   // [num_rows, 3]: (src state_id, src ring slot, dst row, rows) (prefill)
    long long* last_token_index;           // [num_rows] (prefill)
    int* kv_swa_full_index;                // [num_places, window] or null (prefill)
    long long compression_stride;
    int capacity;
    int num_rows;
    int num_places;                        // T: token places of the step
    int window;
    int tokens_per_step;
    int limit;                             // most tokens of a row: tokens_per_step, or max_prefill_tokens in a prefill
    int num_compressions;
    int rows_per_chunk;                    // 0: no chunk sums, blocks sum every row before theirs
    int packed;
    int vector_index;                      // kv_swa_index or kv_swa_full_index may be written 16 bytes at a time
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

// The same, -1 also for a row past the batch.
__device__ __forceinline__ int state_at(const Params& p, int row) { return row < p.num_rows ? state_of_row(p, row) : -1; }

struct Row {
    int state_id;
    int q_start;
    int prompt_end;
    int swa_valid_start;
    int kv_cached_end;
    int generation;
    int seqlen_q;
    int known_error;  // what the record holds already
    int error;        // what is wrong with it now
    int places;       // token places it takes
    int first_place;  // of them
    bool live;        // its tokens are written, not PAD
};

// Places of a row with this state. Without a branch around the load (an id that names no state reads record 0 instead), so that the
// loads of several rows are in flight together.
__device__ __forceinline__ int places_of_state(const Params& p, int state_id) {
    const int2 phase_and_q = reinterpret_cast<const int2*>(p.records)[static_cast<long long>(larger(state_id, 0)) * RECORD_INT4S * 2];
    return state_id < 0 ? 0 : row_places(phase_and_q.x, phase_and_q.y, p.limit);
}

__device__ __forceinline__ int places_of_row(const Params& p, int row) { return places_of_state(p, state_of_row(p, row)); }

// (places, live tokens) of a row, as if it fits; branchless like places_of_state.
__device__ __forceinline__ int2 places_and_live(const Params& p, int row) {
    const int state_id = state_of_row(p, row), some_state = larger(state_id, 0);
    const int4 a = record_part(p, some_state, 0);
    const int valid_start = p.records[static_cast<long long>(some_state) * RECORD_INT4S * 4 + RECORD_VALID_START];
    const int places = state_id < 0 ? 0 : row_places(a.x, a.y, p.limit);
    const bool sound = row_error(a.x, a.y, a.z, a.w, valid_start, p.limit) == NO_ERROR;
    return {places, sound ? places : 0};
}

// A row with this state (-1: padding); branchless like places_of_state.
__device__ __forceinline__ Row row_of_state(const Params& p, int row, int state_id) {
    const int some_state = larger(state_id, 0);
    const int4 a = record_part(p, some_state, 0), b = record_part(p, some_state, 1);
    Row r;
    r.state_id = state_id;
    r.seqlen_q = a.y;
    r.q_start = a.z;
    r.prompt_end = a.w;
    r.swa_valid_start = b.x;
    r.kv_cached_end = b.y;
    r.generation = b.z;
    r.known_error = b.w;
    r.places = state_id < 0 ? 0 : row_places(a.x, a.y, p.limit);
    r.error = state_id < 0 ? NO_ERROR : row_error(a.x, a.y, a.z, a.w, b.x, p.limit);
    r.first_place = row * p.tokens_per_step;
    r.live = r.places > 0 && r.error == NO_ERROR;
    return r;
}

// Sum over the block; every thread gets it. `partial`: shared memory of MAX_WARPS ints, free again after the next barrier.
__device__ __forceinline__ int block_sum(int value, int* partial) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % WARP;
    const int sum = __reduce_add_sync(ALL_LANES, value);
    if (lane == 0) partial[thread / WARP] = sum;
    __syncthreads();
    return __reduce_add_sync(ALL_LANES, lane < blockDim.x * blockDim.y / WARP ? partial[lane] : 0);
}

// Sum of the values of the lanes before this one.
__device__ __forceinline__ int lanes_before(int value) {
    const int lane = threadIdx.x % WARP;
    int sum = value;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    return sum - value;
}

// The two sections that the query at `position` of a step that begins at q_start sees: (start, length) of history rows, which begin at
// `first_history`, and of the step's own tokens, which begin at `first_token`.
__device__ __forceinline__ int4 pivots_at(int position, int q_start, int valid_start, int window, int first_history,
                                          int first_token) {
    const int begin = window_begin(position, window, valid_start);
    const int start = history_start(begin, q_start, window), chunk = chunk_start(begin, q_start);
    return {first_history + start, window - start, first_token + chunk, position - q_start - chunk + 1};
}

// The same of a row's j-th token, in a buffer of B * W history rows, then the step's own tokens.
__device__ __forceinline__ int4 pivots_of(const Params& p, const Row& r, int row, int j) {
    if (!r.live || j >= r.places) return {0, 0, 0, 0};
    return pivots_at(r.q_start + j, r.q_start, r.swa_valid_start, p.window, row * p.window, p.num_rows * p.window + r.first_place);
}

// How `window` history rows from `to` on are filled: zeros for positions that are missing, all of them where state_id is -1, then the
// ring range, split where the ring goes round.
__device__ __forceinline__ void write_load_plan(int4* plan, int to, int state_id, int q_start, int valid_start, int window,
                                                const Divisor& ring) {
    int4 segments[3] = {{-1, 0, 0, 0}, {-1, 0, 0, 0}, {-1, 0, 0, 0}};
    const int zeros = state_id >= 0 ? history_padding(q_start, valid_start, window) : window;
    const int kept = window - zeros;
    const int slot = kept > 0 ? ring_slot(q_start - kept, ring) : 0;
    const int before_wrap = smaller(kept, ring.divisor - slot);
    const int4 padding = {-1, 0, to, zeros};
    const int4 first = {state_id, slot, to + zeros, before_wrap};
    const int4 second = {state_id, 0, to + zeros + before_wrap, kept - before_wrap};
    // Left-packed; written out case by case, since an array indexed at run time would live in local memory.
    if (zeros > 0) {
        segments[0] = padding;
        if (kept > 0) segments[1] = first;
        if (kept > before_wrap) segments[2] = second;
    } else {
        segments[0] = first;
        if (kept > before_wrap) segments[1] = second;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) plan[i] = segments[i];
}

// What says where a token's window is.
__device__ __forceinline__ void write_window(const Params& p, const Row& r, int row, int place, int j) {
    int2 offset_len = {0, 0};
    if (r.live && j < r.places) {
        const int position = r.q_start + j, begin = window_begin(position, p.window, r.swa_valid_start);
        offset_len = {r.state_id * p.ring.divisor + ring_slot(begin, p.ring), position - begin + 1};
    }
    p.kv_swa_index_offset_len[place] = offset_len;
    p.kv_swa_full_index_pivots[place] = pivots_of(p, r, row, j);
    p.swa_len[place] = offset_len.y;
}

// What a token is, and where its own entries go.
__device__ __forceinline__ void write_token(const Params& p, const Row& r, int row, int place, int j) {
    const bool live = r.live && j < r.places;
    const int position = r.q_start + j;
    if (p.input_ids) {
        const bool carried = live && r.q_start >= r.prompt_end && r.places <= p.tokens_per_step;
        p.input_ids[place] = carried ? p.token_ids[static_cast<long long>(r.state_id) * p.tokens_per_step + j] : 0;
    }
    long long write_slot = -1;
    if (live && !overwritten(j, r.places, p.ring.divisor))
        write_slot = r.state_id * p.ring.divisor + ring_slot(position, p.ring);
    p.swa_write_slot[place] = write_slot;
    p.positions[place] = live ? position : 0;
    p.token_row[place] = live ? row : -1;
    p.token_state_id[place] = live ? r.state_id : -1;
    for (int c = 0; c < p.num_compressions; ++c) {
        const Compression& compression = p.compressions[c];
        long long slot = -1, index = -1;
        if (live) {
            if (!overwritten(j, r.places, compression.entries.divisor))
                slot = static_cast<long long>(r.state_id) * compression.entries.divisor + remainder(position, compression.entries);
            index = compressed_index(position, compression.ratio, r.kv_cached_end);
        }
        p.compression_write_slot[c * p.compression_stride + place] = slot;
        p.compression_index[c * p.compression_stride + place] = index;
    }
}

__device__ __forceinline__ void write_row(const Params& p, const Row& r, int row) {
    const int length = r.live ? r.places : 0;
    p.seqlens_q[row] = length;
    p.seqlens_k[row] = r.live ? r.q_start + length : 0;
    p.cu_seqlens_q[row] = smaller(r.first_place, p.num_places);
    const int reason = r.error != NO_ERROR ? TICKET_ERROR : r.places > 0 ? TICKET_DEFERRED : TICKET_PADDING;
    p.tickets[row] = r.live ? int4{r.state_id, r.generation, r.q_start, length} : int4{-1, reason, r.state_id, 0};
    if (r.error != NO_ERROR && r.known_error == NO_ERROR) {  // the first error of a state stays
        int* record = p.records + static_cast<long long>(r.state_id) * RECORD_INT4S * 4;
        record[RECORD_ERROR] = r.error;
        record[RECORD_ERROR_VALUE] = row_error_value(r.error, r.seqlen_q, r.q_start, r.swa_valid_start);
        atomicAdd(&p.counters[COUNTER_ERRORS], 1ull);
    }
}

}  // namespace zos
