// prepare_v4_decode_metadata: one launch turns the sequence records of a batch into the attention metadata of a decode step.
//
// Block 0 sums the batch up (num_tokens, the last cu_seqlens_q, deferred rows). Every other block owns blockDim.y rows, and a row
// has blockDim.x / 32 warps: with one, it writes everything; with more, the first writes the scalars (one lane a token) and the
// others share the tokens' `window` indices; with a warp for each token, that also writes where the token's window is. Each warp reads
// its row itself, so a strided batch has no barrier at all. A packed
// batch must know how many places the rows before it take: each block sums them, or, in long batches, takes the sums that
// sum_row_places left a launch before, while the loads of its own rows are under way.
#include "metadata.cuh"

using namespace zos;

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

// Row `row`, and in *before what this thread sums of the token places of all rows before `first_row`. The loads for both go out
// together: state ids first, then records.
__device__ __forceinline__ Row read_row_and_places_before(const Params& p, int row, int first_row, int* before) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    const int chunks = p.rows_per_chunk > 0 ? first_row / p.rows_per_chunk : 0;
    const int share = chunks * p.rows_per_chunk + thread;
    const int own_state = state_at(p, row), share_state = state_at(p, share);
    const int share_places = places_of_state(p, share_state);
    const Row r = row_of_state(p, row, own_state);
    int places = share < first_row ? share_places : 0;
#pragma unroll 4
    for (int other = share + threads; other < first_row; other += threads) places += places_of_row(p, other);
    for (int chunk = thread; chunk < chunks; chunk += threads) places += p.chunk_places[chunk];
    *before = places;
    return r;
}

// Token place of the j-th token of a row; of the row's unused tokens, places at the end of a packed batch, counted backwards: the
// unused tokens of all rows cover exactly the tail, without anyone knowing where it begins. May be past the budget.
__device__ __forceinline__ int token_place(const Params& p, const Row& r, int row, int j) {
    if (!p.packed || j < r.places) return r.first_place + j;
    const int unused_before = row * p.tokens_per_step - r.first_place + (j - r.places);
    return p.num_rows * p.tokens_per_step - 1 - unused_before;
}

// A warp writes the indices of one token: 4 slots a lane and store where 16-byte stores are legal. Not unrolled: a common window is
// done in one turn, and what unrolling puts before it costs more than that.
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
#pragma unroll 1
        for (int k = lane * 4; k < p.window; k += WARP * 4)
            *reinterpret_cast<int4*>(out + k) = {slot_at(k), slot_at(k + 1), slot_at(k + 2), slot_at(k + 3)};
    } else {
#pragma unroll 1
        for (int k = lane; k < p.window; k += WARP) out[k] = slot_at(k);
    }
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS* WARP)
    prepare_v4_decode_metadata(const __grid_constant__ Params p) {
    wait_for_predecessor();
    if (blockIdx.x == 0) return summarize_batch(p);
    const int lane = threadIdx.x % WARP, part = threadIdx.x / WARP, parts = blockDim.x / WARP;
    const int first_row = (blockIdx.x - 1) * blockDim.y;
    const int row = first_row + threadIdx.y;

    Row r;
    if (p.packed) {
        __shared__ int partial[MAX_WARPS];
        __shared__ int own_places[MAX_ROWS_PER_BLOCK];
        int before;
        r = read_row_and_places_before(p, row, first_row, &before);
        if (threadIdx.x == 0) own_places[threadIdx.y] = r.places;
        r.first_place = block_sum(before, partial);  // its barrier publishes own_places too
        r.first_place += __reduce_add_sync(ALL_LANES, lane < threadIdx.y ? own_places[lane] : 0);
        r.live = r.live && r.first_place + r.places <= p.num_places;
    } else {
        r = row_of_state(p, row, state_at(p, row));
    }
    if (row >= p.num_rows) return;

    const bool warp_per_token = parts > p.tokens_per_step;
    if (part == 0) {
        if (lane == 0) write_row(p, r, row);
#pragma unroll 1
        for (int j = lane; j < p.tokens_per_step; j += WARP) {
            const int place = token_place(p, r, row, j);
            if (place >= p.num_places) continue;
            write_token(p, r, row, place, j);
            if (!warp_per_token) write_window(p, r, row, place, j);
        }
        if (parts > 1) return;
    }
    const int first = parts > 1 ? part - 1 : 0, step = parts > 1 ? parts - 1 : 1;
#pragma unroll 1
    for (int j = first; j < p.tokens_per_step; j += step) {
        const int place = token_place(p, r, row, j);
        if (place >= p.num_places) continue;
        write_index(p, r, place, j);
        if (warp_per_token && lane == 0) write_window(p, r, row, place, j);
    }
}

// Token places of each chunk of rows_per_chunk (= blockDim.x) rows, for packed batches too long for every block to sum.
extern "C" __global__ void sum_row_places(const __grid_constant__ Params p) {
    wait_for_predecessor();
    __shared__ int partial[MAX_WARPS];
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    const int sum = block_sum(row < p.num_rows ? places_of_row(p, row) : 0, partial);
    if (threadIdx.x == 0) p.chunk_places[blockIdx.x] = sum;
}
