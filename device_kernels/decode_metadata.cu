// prepare_v4_decode_metadata: one launch turns the sequence records of a batch into the attention metadata of a decode step.
//
// Block 0 sums the batch up (num_tokens, the last cu_seqlens_q, deferred rows). Every other block owns `rows_per_block` rows:
// its first warp reads and judges them, then all but its last warp write one token's `window` indices each, and the last warp
// writes the tokens' scalars, one lane a token. A packed batch needs to know how many places the rows before it take: each block
// sums them itself, or, in batches past ROWS_PER_CHUNK * a few, takes the sums that sum_row_places left a launch before.
#include "ring.cuh"

using namespace zos;

constexpr int WARP = 32;
constexpr int MAX_WARPS = 32;
constexpr int MAX_ROWS_PER_BLOCK = 32;  // the rows of a block are judged by one warp
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int RECORD_INT4S = 4;  // a record is 16 int32: (phase, seqlen_q, q_start, prompt_end), (swa_valid_start, kv_cached_end,
                                 // generation, error), (head, stop_at, chunk_q, decode_q), (error_value, -, -, -)
constexpr int RECORD_ERROR = 7, RECORD_ERROR_VALUE = 12;
constexpr int COUNTER_DEFERRED = 2, COUNTER_ERRORS = 3;

struct Compression {  // one row of the compression table
    Divisor ratio;
    Divisor entries;
    int unused[2];
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
    const Compression* compressions;       // [num_compressions]
    int* chunk_places;                     // [ceil(num_rows / rows_per_chunk)]: token places of each chunk of rows
    long long compression_stride;
    int capacity;
    int num_rows;
    int num_places;                        // T: token places of the step
    int window;
    int tokens_per_step;
    int num_compressions;
    int rows_per_block;
    int rows_per_chunk;                    // 0: no chunk sums, blocks sum every row before theirs
    int packed;
    int vector_index;                      // kv_swa_index may be written 16 bytes at a time
    Divisor ring;
};

struct Row {  // what the token writers need of a row
    int state_id;
    int q_start;
    int swa_valid_start;
    int kv_cached_end;
    int prompt_end;
    int places;       // token places it takes
    int first_place;  // of them
    int live;         // its tokens are written, not PAD
};

__device__ __forceinline__ int4 record_part(const Params& p, int state_id, int part) {
    return reinterpret_cast<const int4*>(p.records)[static_cast<long long>(state_id) * RECORD_INT4S + part];
}

// State id of a row, -1 for every id that names no state.
__device__ __forceinline__ int state_of_row(const Params& p, int row) {
    const int state_id = p.state_ids[row];
    return static_cast<unsigned>(state_id) < static_cast<unsigned>(p.capacity) ? state_id : -1;
}

__device__ __forceinline__ int places_of_row(const Params& p, int row) {
    const int state_id = state_of_row(p, row);
    if (state_id < 0) return 0;
    const int2 head = reinterpret_cast<const int2*>(p.records)[static_cast<long long>(state_id) * RECORD_INT4S * 2];
    return row_places(head.x, head.y, p.tokens_per_step);
}

// (places, tokens that may be live) of a row: they differ for a row in error.
__device__ __forceinline__ int2 places_and_live(const Params& p, int row) {
    const int state_id = state_of_row(p, row);
    if (state_id < 0) return {0, 0};
    const int4 r = record_part(p, state_id, 0);
    const int valid_start = p.records[static_cast<long long>(state_id) * RECORD_INT4S * 4 + 4];
    const int places = row_places(r.x, r.y, p.tokens_per_step);
    return {places, row_error(r.x, r.y, r.z, r.w, valid_start, p.tokens_per_step) == NO_ERROR ? places : 0};
}

// Sum over the block; every thread gets it. `partial`: shared memory of MAX_WARPS ints, free again after the next barrier.
__device__ __forceinline__ int block_sum(int value, int* partial) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    const int sum = __reduce_add_sync(ALL_LANES, value);
    if (lane == 0) partial[warp] = sum;
    __syncthreads();
    return __reduce_add_sync(ALL_LANES, lane < warps ? partial[lane] : 0);
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

// num_tokens, cu_seqlens_q[num_rows] and the deferred count. Each thread takes a run of neighbouring rows.
__device__ void summarize_batch(const Params& p) {
    __shared__ int partial[3][MAX_WARPS];
    const int run = (p.num_rows + blockDim.x - 1) / blockDim.x;
    const int begin = smaller(threadIdx.x * run, p.num_rows), end = smaller(begin + run, p.num_rows);
    int places = 0, live = 0;
    for (int row = begin; row < end; ++row) {
        const int2 both = places_and_live(p, row);
        places += both.x;
        live += both.y;
    }
    const int total = block_sum(places, partial[0]);
    if (p.packed && total > p.num_places) {  // rows are deferred: count again, up to the first row that does not fit
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const int warps_before = __reduce_add_sync(ALL_LANES, lane < warp ? partial[0][lane] : 0);
        int place = warps_before + lanes_before(places), deferred = 0;
        live = 0;
        for (int row = begin; row < end; ++row) {
            const int2 both = places_and_live(p, row);
            const bool fits = place + both.x <= p.num_places;
            live += fits ? both.y : 0;
            deferred += !fits && both.y > 0;
            place += both.x;
        }
        deferred = block_sum(deferred, partial[1]);
        if (threadIdx.x == 0) atomicAdd(&p.counters[COUNTER_DEFERRED], static_cast<unsigned long long>(deferred));
    }
    live = block_sum(live, partial[2]);
    if (threadIdx.x == 0) {
        p.num_tokens[0] = live;
        p.cu_seqlens_q[p.num_rows] = p.packed ? smaller(total, p.num_places) : p.num_rows * p.tokens_per_step;
    }
}

// Token places of all rows before `first_row`, as far as this thread sums them.
__device__ __forceinline__ int places_before(const Params& p, int first_row) {
    int places = 0, begin = 0;
    if (p.rows_per_chunk > 0) {
        const int chunks = first_row / p.rows_per_chunk;
        begin = chunks * p.rows_per_chunk;
        for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) places += p.chunk_places[chunk];
    }
    for (int row = begin + threadIdx.x; row < first_row; row += blockDim.x) places += places_of_row(p, row);
    return places;
}

// Token place of the j-th token of a row; of the row's unused tokens, places at the end of a packed batch, counted backwards: the
// unused tokens of all rows cover exactly the tail, without anyone knowing where it begins.
__device__ __forceinline__ int token_place(const Params& p, const Row& r, int row, int j) {
    if (!p.packed) return row * p.tokens_per_step + j;
    if (j < r.places) return r.first_place + j;
    const int unused_before = row * p.tokens_per_step - r.first_place + (j - r.places);
    return p.num_rows * p.tokens_per_step - 1 - unused_before;
}

__device__ __forceinline__ void write_index(const Params& p, const Row& r, int place, int j) {
    const int lane = threadIdx.x % WARP;
    int* out = p.kv_swa_index + static_cast<long long>(place) * p.window;
    int first_slot = 0, slot = 0, length = 0;
    if (r.live && j < r.places) {
        const int position = r.q_start + j;
        const int begin = window_begin(position, p.window, r.swa_valid_start);
        first_slot = r.state_id * p.ring.divisor;
        slot = ring_slot(begin, p.ring);
        length = position - begin + 1;
    }
    const int ring = p.ring.divisor;
    if (p.vector_index) {
        for (int k = lane * 4; k < p.window; k += WARP * 4) {
            int4 slots;
            slots.x = k + 0 < length ? first_slot + ring_advance(slot, k + 0, ring) : -1;
            slots.y = k + 1 < length ? first_slot + ring_advance(slot, k + 1, ring) : -1;
            slots.z = k + 2 < length ? first_slot + ring_advance(slot, k + 2, ring) : -1;
            slots.w = k + 3 < length ? first_slot + ring_advance(slot, k + 3, ring) : -1;
            *reinterpret_cast<int4*>(out + k) = slots;
        }
    } else {
        for (int k = lane; k < p.window; k += WARP) out[k] = k < length ? first_slot + ring_advance(slot, k, ring) : -1;
    }
}

__device__ __forceinline__ void write_scalars(const Params& p, const Row& r, int row, int place, int j) {
    int2 offset_len = {0, 0};
    int4 pivots = {0, 0, 0, 0};
    long long position_out = 0, input_id = 0, write_slot = -1;
    int row_out = -1, state_out = -1;
    const bool live = r.live && j < r.places;
    const int position = r.q_start + j;
    if (live) {
        const int begin = window_begin(position, p.window, r.swa_valid_start);
        const int first_slot = r.state_id * p.ring.divisor;
        const int start = history_start(begin, r.q_start, p.window), chunk = chunk_start(begin, r.q_start);
        offset_len = {first_slot + ring_slot(begin, p.ring), position - begin + 1};
        pivots = {row * p.window + start, p.window - start, p.num_rows * p.window + r.first_place + chunk, j - chunk + 1};
        position_out = position;
        write_slot = first_slot + ring_slot(position, p.ring);
        row_out = row;
        state_out = r.state_id;
        if (p.input_ids && r.q_start >= r.prompt_end)
            input_id = p.token_ids[static_cast<long long>(r.state_id) * p.tokens_per_step + j];
    }
    p.kv_swa_index_offset_len[place] = offset_len;
    p.kv_swa_full_index_pivots[place] = pivots;
    p.swa_len[place] = offset_len.y;
    p.positions[place] = position_out;
    if (p.input_ids) p.input_ids[place] = input_id;
    p.swa_write_slot[place] = write_slot;
    p.token_row[place] = row_out;
    p.token_state_id[place] = state_out;
    for (int c = 0; c < p.num_compressions; ++c) {
        const Compression compression = p.compressions[c];
        long long slot = -1, index = -1;
        if (live) {
            slot = static_cast<long long>(r.state_id) * compression.entries.divisor + remainder(position, compression.entries);
            index = compressed_index(position, compression.ratio, r.kv_cached_end);
        }
        p.compression_write_slot[c * p.compression_stride + place] = slot;
        p.compression_index[c * p.compression_stride + place] = index;
    }
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS* WARP)
    prepare_v4_decode_metadata(const __grid_constant__ Params p) {
    if (blockIdx.x == 0) {
        summarize_batch(p);
        return;
    }
    __shared__ int partial[MAX_WARPS];
    __shared__ Row rows[MAX_ROWS_PER_BLOCK];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    const int first_row = (blockIdx.x - 1) * p.rows_per_block;
    const int num_rows = smaller(p.rows_per_block, p.num_rows - first_row);
    const int row = first_row + lane;

    // The first warp's loads of its own rows go out before the loads of the sum, so that both are in flight together.
    Row r = {-1, 0, 0, 0, 0, 0, row * p.tokens_per_step, 0};
    int generation = 0, error = NO_ERROR, error_value = 0, known_error = NO_ERROR;
    if (warp == 0 && lane < num_rows) {
        r.state_id = state_of_row(p, row);
        if (r.state_id >= 0) {
            const int4 a = record_part(p, r.state_id, 0), b = record_part(p, r.state_id, 1);
            r.q_start = a.z;
            r.prompt_end = a.w;
            r.swa_valid_start = b.x;
            r.kv_cached_end = b.y;
            generation = b.z;
            known_error = b.w;
            r.places = row_places(a.x, a.y, p.tokens_per_step);
            error = row_error(a.x, a.y, a.z, a.w, b.x, p.tokens_per_step);
            error_value = row_error_value(error, a.y, a.z, b.x);
        }
    }
    if (p.packed) {
        const int before = block_sum(places_before(p, first_row), partial);
        r.first_place = before + lanes_before(r.places);
    }
    if (warp == 0 && lane < num_rows) {
        r.live = r.places > 0 && error == NO_ERROR && (!p.packed || r.first_place + r.places <= p.num_places);
        rows[lane] = r;
    }
    __syncthreads();

    if (warp == 0 && lane < num_rows) {
        const int length = r.live ? r.places : 0;
        p.seqlens_q[row] = length;
        p.seqlens_k[row] = r.live ? r.q_start + length : 0;
        p.cu_seqlens_q[row] = p.packed ? smaller(r.first_place, p.num_places) : r.first_place;
        p.tickets[row] = r.live ? int4{r.state_id, generation, r.q_start, length} : int4{-1, 0, 0, 0};
        if (error != NO_ERROR && known_error == NO_ERROR) {  // the first error of a state stays
            int* record = p.records + static_cast<long long>(r.state_id) * RECORD_INT4S * 4;
            record[RECORD_ERROR] = error;
            record[RECORD_ERROR_VALUE] = error_value;
            atomicAdd(&p.counters[COUNTER_ERRORS], 1ull);
        }
    }
    const int items = num_rows * p.tokens_per_step;
    if (warp == warps - 1) {
        for (int item = lane; item < items; item += WARP) {
            const int local = item / p.tokens_per_step, j = item % p.tokens_per_step;
            const int place = token_place(p, rows[local], first_row + local, j);
            if (place < p.num_places) write_scalars(p, rows[local], first_row + local, place, j);
        }
    } else {
        for (int item = warp; item < items; item += warps - 1) {
            const int local = item / p.tokens_per_step, j = item % p.tokens_per_step;
            const int place = token_place(p, rows[local], first_row + local, j);
            if (place < p.num_places) write_index(p, rows[local], place, j);
        }
    }
}

// Token places of each chunk of rows_per_chunk (= blockDim.x) rows, for packed batches too long for every block to sum.
extern "C" __global__ void sum_row_places(const __grid_constant__ Params p) {
    __shared__ int partial[MAX_WARPS];
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    const int sum = block_sum(row < p.num_rows ? places_of_row(p, row) : 0, partial);
    if (threadIdx.x == 0) p.chunk_places[blockIdx.x] = sum;
}
