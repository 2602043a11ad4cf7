// prepare_v4_decode_metadata: one launch turns the sequence records of a batch into the attention metadata of a decode step.
//
// Block 0 sums the batch up (num_tokens, the last cu_seqlens_q, deferred rows). Every other block owns blockDim.y rows, and a row
// has blockDim.x / 32 warps: with one, it writes everything; with more, the first writes the scalars (one lane a token) and the
// others share the tokens' `window` indices. Each warp reads its row itself, so a strided batch has no barrier at all. A packed
// batch must know how many places the rows before it take: each block sums them, or, in long batches, takes the sums that
// sum_row_places left a launch before, while the loads of its own rows are under way.
#include "decode_metadata.cuh"

using namespace zos;

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

// Places of a row. Without a branch around the load (an id that names no state reads record 0 instead), so that the loads of
// several rows are in flight together.
__device__ __forceinline__ int places_of_row(const Params& p, int row) {
    const int state_id = state_of_row(p, row);
    const int2 phase_and_q = reinterpret_cast<const int2*>(p.records)[static_cast<long long>(larger(state_id, 0)) * RECORD_INT4S * 2];
    return state_id < 0 ? 0 : row_places(phase_and_q.x, phase_and_q.y, p.tokens_per_step);
}

// (places, live tokens) of a row, as if it fits; branchless like places_of_row.
__device__ __forceinline__ int2 places_and_live(const Params& p, int row) {
    const int state_id = state_of_row(p, row), some_state = larger(state_id, 0);
    const int4 a = record_part(p, some_state, 0);
    const int valid_start = p.records[static_cast<long long>(some_state) * RECORD_INT4S * 4 + RECORD_VALID_START];
    const int places = state_id < 0 ? 0 : row_places(a.x, a.y, p.tokens_per_step);
    const bool sound = row_error(a.x, a.y, a.z, a.w, valid_start, p.tokens_per_step) == NO_ERROR;
    return {places, sound ? places : 0};
}

__device__ __forceinline__ Row read_row(const Params& p, int row) {
    Row r = {-1, 0, 0, 0, 0, 0, 0, NO_ERROR, NO_ERROR, 0, row * p.tokens_per_step, false};
    if (row >= p.num_rows) return r;
    r.state_id = state_of_row(p, row);
    if (r.state_id < 0) return r;
    const int4 a = record_part(p, r.state_id, 0), b = record_part(p, r.state_id, 1);
    r.seqlen_q = a.y;
    r.q_start = a.z;
    r.prompt_end = a.w;
    r.swa_valid_start = b.x;
    r.kv_cached_end = b.y;
    r.generation = b.z;
    r.known_error = b.w;
    r.places = row_places(a.x, a.y, p.tokens_per_step);
    r.error = row_error(a.x, a.y, a.z, a.w, b.x, p.tokens_per_step);
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

// num_tokens, cu_seqlens_q[num_rows] and the deferred count. Each thread takes a run of neighbouring rows.
__device__ void summarize_batch(const Params& p) {
    __shared__ int partial[3][MAX_WARPS];
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    const int run = (p.num_rows + threads - 1) / threads;
    const int begin = smaller(thread * run, p.num_rows), end = smaller(begin + run, p.num_rows);
    int places = 0, live = 0;
#pragma unroll 4
    for (int row = begin; row < end; ++row) {
        const int2 both = places_and_live(p, row);
        places += both.x;
        live += both.y;
    }
    const int total = p.packed ? block_sum(places, partial[0]) : p.num_rows * p.tokens_per_step;
    if (p.packed && total > p.num_places) {  // rows are deferred: count again, up to the first row that does not fit
        const int warp = thread / WARP, lane = thread % WARP;
        int place = __reduce_add_sync(ALL_LANES, lane < warp ? partial[0][lane] : 0) + lanes_before(places), deferred = 0;
        live = 0;
        for (int row = begin; row < end; ++row) {
            const int2 both = places_and_live(p, row);
            const bool fits = place + both.x <= p.num_places;
            live += fits ? both.y : 0;
            deferred += !fits && both.y > 0;
            place += both.x;
        }
        deferred = block_sum(deferred, partial[1]);
        if (thread == 0 && deferred > 0)
            atomicAdd(&p.counters[COUNTER_DEFERRED], static_cast<unsigned long long>(deferred));
    }
    live = block_sum(live, partial[2]);
    if (thread == 0) {
        p.num_tokens[0] = live;
        p.cu_seqlens_q[p.num_rows] = smaller(total, p.num_places);
    }
}

// Token places of all rows before `first_row`, as far as this thread sums them.
__device__ __forceinline__ int places_before(const Params& p, int first_row) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    int places = 0, begin = 0;
    if (p.rows_per_chunk > 0) {
        const int chunks = first_row / p.rows_per_chunk;
        begin = chunks * p.rows_per_chunk;
        for (int chunk = thread; chunk < chunks; chunk += threads) places += p.chunk_places[chunk];
    }
#pragma unroll 4
    for (int row = begin + thread; row < first_row; row += threads) places += places_of_row(p, row);
    return places;
}

// Token place of the j-th token of a row; of the row's unused tokens, places at the end of a packed batch, counted backwards: the
// unused tokens of all rows cover exactly the tail, without anyone knowing where it begins. May be past the budget.
__device__ __forceinline__ int token_place(const Params& p, const Row& r, int row, int j) {
    if (!p.packed || j < r.places) return r.first_place + j;
    const int unused_before = row * p.tokens_per_step - r.first_place + (j - r.places);
    return p.num_rows * p.tokens_per_step - 1 - unused_before;
}

// A warp writes the indices of one token: 4 slots a lane and store where 16-byte stores are legal.
__device__ __forceinline__ void write_index(const Params& p, const Row& r, int place, int j) {
    const int lane = threadIdx.x % WARP, ring = p.ring.divisor;
    int* out = p.kv_swa_index + static_cast<long long>(place) * p.window;
    int first_slot = 0, slot = 0, length = 0;
    if (r.live && j < r.places) {
        const int position = r.q_start + j;
        const int begin = window_begin(position, p.window, r.swa_valid_start);
        first_slot = r.state_id * ring;
        slot = ring_slot(begin, p.ring);
        length = position - begin + 1;
    }
    const auto slot_at = [&](int k) { return k < length ? first_slot + ring_advance(slot, k, ring) : -1; };
    if (p.vector_index) {
        for (int k = lane * 4; k < p.window; k += WARP * 4)
            *reinterpret_cast<int4*>(out + k) = {slot_at(k), slot_at(k + 1), slot_at(k + 2), slot_at(k + 3)};
    } else {
        for (int k = lane; k < p.window; k += WARP) out[k] = slot_at(k);
    }
}

__device__ __forceinline__ void write_scalars(const Params& p, const Row& r, int row, int place, int j) {
    int2 offset_len = {0, 0};
    int4 pivots = {0, 0, 0, 0};  // into B * W history rows (section 1), then the step's own tokens (section 2)
    long long input_id = 0, write_slot = -1;
    const bool live = r.live && j < r.places;
    const int position = r.q_start + j;
    if (live) {
        const int begin = window_begin(position, p.window, r.swa_valid_start);
        const int first_slot = r.state_id * p.ring.divisor;
        const int start = history_start(begin, r.q_start, p.window), chunk = chunk_start(begin, r.q_start);
        offset_len = {first_slot + ring_slot(begin, p.ring), position - begin + 1};
        pivots = {row * p.window + start, p.window - start, p.num_rows * p.window + r.first_place + chunk, j - chunk + 1};
        write_slot = first_slot + ring_slot(position, p.ring);
        if (p.input_ids && r.q_start >= r.prompt_end)
            input_id = p.token_ids[static_cast<long long>(r.state_id) * p.tokens_per_step + j];
    }
    p.kv_swa_index_offset_len[place] = offset_len;
    p.kv_swa_full_index_pivots[place] = pivots;
    p.swa_len[place] = offset_len.y;
    p.positions[place] = live ? position : 0;
    if (p.input_ids) p.input_ids[place] = input_id;
    p.swa_write_slot[place] = write_slot;
    p.token_row[place] = live ? row : -1;
    p.token_state_id[place] = live ? r.state_id : -1;
    for (int c = 0; c < p.num_compressions; ++c) {
        const Compression& compression = p.compressions[c];
        long long slot = -1, index = -1;
        if (live) {
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
    p.tickets[row] = r.live ? int4{r.state_id, r.generation, r.q_start, length} : int4{-1, 0, 0, 0};
    if (r.error != NO_ERROR && r.known_error == NO_ERROR) {  // the first error of a state stays
        int* record = p.records + static_cast<long long>(r.state_id) * RECORD_INT4S * 4;
        record[RECORD_ERROR] = r.error;
        record[RECORD_ERROR_VALUE] = row_error_value(r.error, r.seqlen_q, r.q_start, r.swa_valid_start);
        atomicAdd(&p.counters[COUNTER_ERRORS], 1ull);
    }
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS* WARP)
    prepare_v4_decode_metadata(const __grid_constant__ Params p) {
    if (blockIdx.x == 0) return summarize_batch(p);
    const int lane = threadIdx.x % WARP, part = threadIdx.x / WARP, parts = blockDim.x / WARP;
    const int first_row = (blockIdx.x - 1) * blockDim.y;
    const int row = first_row + threadIdx.y;

    Row r = read_row(p, row);
    if (p.packed) {
        __shared__ int partial[MAX_WARPS];
        __shared__ int own_places[MAX_ROWS_PER_BLOCK];
        const int before = places_before(p, first_row);
        if (threadIdx.x == 0) own_places[threadIdx.y] = r.places;
        r.first_place = block_sum(before, partial);  // its barrier publishes own_places too
        r.first_place += __reduce_add_sync(ALL_LANES, lane < threadIdx.y ? own_places[lane] : 0);
        r.live = r.live && r.first_place + r.places <= p.num_places;
    }
    if (row >= p.num_rows) return;

    if (part == 0) {
        if (lane == 0) write_row(p, r, row);
        for (int j = lane; j < p.tokens_per_step; j += WARP) {
            const int place = token_place(p, r, row, j);
            if (place < p.num_places) write_scalars(p, r, row, place, j);
        }
        if (parts > 1) return;
    }
    const int first = parts > 1 ? part - 1 : 0, step = parts > 1 ? parts - 1 : 1;
    for (int j = first; j < p.tokens_per_step; j += step) {
        const int place = token_place(p, r, row, j);
        if (place < p.num_places) write_index(p, r, place, j);
    }
}

// Token places of each chunk of rows_per_chunk (= blockDim.x) rows, for packed batches too long for every block to sum.
extern "C" __global__ void sum_row_places(const __grid_constant__ Params p) {
    __shared__ int partial[MAX_WARPS];
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    const int sum = block_sum(row < p.num_rows ? places_of_row(p, row) : 0, partial);
    if (threadIdx.x == 0) p.chunk_places[blockIdx.x] = sum;
}
