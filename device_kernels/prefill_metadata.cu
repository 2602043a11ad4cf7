// prepare_v4_prefill_metadata: attention metadata of a step whose rows may be chunks of any length, always packed.
//
// Two launches. `prepare_prefill_rows`, one block, judges and sums the rows and writes what belongs to a row: its ticket, its load
// plan, where its tokens begin. `prepare_v4_prefill_metadata` then goes by token place, so that long and short rows cost alike: each
// thread finds its token's row in cu_seqlens_q and writes the scalars; a warp a token writes kv_swa_full_index where it is wanted.
#include "metadata.cuh"

using namespace zos;

// The row's history rows: zeros for positions that are missing, then the ring range, split where the ring goes round.
__device__ __forceinline__ void write_load_plan(const Params& p, const Row& r, int row) {
    int4 segments[3] = {{-1, 0, 0, 0}, {-1, 0, 0, 0}, {-1, 0, 0, 0}};
    const int to = row * p.window;
    const int zeros = r.live ? history_padding(r.q_start, r.swa_valid_start, p.window) : p.window;
    const int kept = p.window - zeros;
    const int slot = kept > 0 ? ring_slot(r.q_start - kept, p.ring) : 0;
    const int before_wrap = smaller(kept, p.ring.divisor - slot);
    const int4 padding = {-1, 0, to, zeros};
    const int4 first = {r.state_id, slot, to + zeros, before_wrap};
    const int4 second = {r.state_id, 0, to + zeros + before_wrap, kept - before_wrap};
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
    for (int i = 0; i < 3; ++i) p.swa_load_plan[row * 3ll + i] = segments[i];
}

// Sum of a value over the threads of the block before this one, and over all; 64 bits, since chunks may be long and rows many.
__device__ __forceinline__ long long threads_before(long long value, long long* partial, long long* total) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    long long sum = value;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const long long other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == WARP - 1) partial[warp] = sum;
    __syncthreads();
    long long before = 0;
    *total = 0;
    for (int w = 0; w < warps; ++w) {
        if (w == warp) before = *total;
        *total += partial[w];
    }
    return before + sum - value;
}

// One block: each thread takes a run of neighbouring rows, so that one scan over the block's sums gives every row its place.
extern "C" __global__ void __launch_bounds__(MAX_WARPS* WARP) prepare_prefill_rows(const __grid_constant__ Params p) {
    __shared__ long long partial[MAX_WARPS];
    __shared__ int live_partial[MAX_WARPS], deferred_partial[MAX_WARPS];
    const int run = (p.num_rows + blockDim.x - 1) / blockDim.x;
    const int begin = smaller(threadIdx.x * run, p.num_rows), end = smaller(begin + run, p.num_rows);
    long long places = 0, total = 0;
#pragma unroll 4
    for (int row = begin; row < end; ++row) places += places_of_row(p, row);
    long long place = threads_before(places, partial, &total);

    int live = 0, deferred = 0;
    for (int row = begin; row < end; ++row) {
        Row r = read_row(p, row);
        const bool fits = place + r.places <= p.num_places;
        r.first_place = place < p.num_places ? static_cast<int>(place) : p.num_places;
        deferred += r.live && !fits;
        r.live = r.live && fits;
        live += r.live ? r.places : 0;
        write_row(p, r, row);
        write_load_plan(p, r, row);
        p.last_token_index[row] = r.live ? r.first_place + r.places - 1 : -1;
        place += r.places;
    }
    live = block_sum(live, live_partial);
    deferred = block_sum(deferred, deferred_partial);
    if (threadIdx.x == 0) {
        p.num_tokens[0] = live;
        p.cu_seqlens_q[p.num_rows] = total < p.num_places ? static_cast<int>(total) : p.num_places;
        if (deferred > 0) atomicAdd(&p.counters[COUNTER_DEFERRED], static_cast<unsigned long long>(deferred));
    }
}

// The row that a token place belongs to, -1 for the tail: the last row whose places begin at or before it.
__device__ __forceinline__ int row_of_place(const Params& p, int place) {
    if (place >= p.cu_seqlens_q[p.num_rows]) return -1;
    int low = 0, high = p.num_rows;  // cu_seqlens_q[low] <= place < cu_seqlens_q[high]
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (p.cu_seqlens_q[middle] <= place)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// What the token writers need of the row of a place; a row that is not live (deferred, in error, the tail) comes as padding.
__device__ __forceinline__ Row row_for_tokens(const Params& p, int row) {
    Row r = {-1, 0, 0, 0, 0, 0, 0, NO_ERROR, NO_ERROR, 0, 0, false};
    if (row < 0) return r;
    const int4 ticket = p.tickets[row];
    if (ticket.w == 0) return r;
    const int4 a = record_part(p, ticket.x, 0), b = record_part(p, ticket.x, 1);
    r.state_id = ticket.x;
    r.q_start = ticket.z;
    r.prompt_end = a.w;
    r.swa_valid_start = b.x;
    r.kv_cached_end = b.y;
    r.places = ticket.w;
    r.first_place = p.cu_seqlens_q[row];
    r.live = true;
    return r;
}

// kv_swa_full_index of one token by one warp: its pivots expanded, history rows first, then the chunk's own, then -1.
__device__ __forceinline__ void write_full_index(const Params& p, int place) {
    const int4 pivots = p.kv_swa_full_index_pivots[place];
    int* out = p.kv_swa_full_index + static_cast<long long>(place) * p.window;
    for (int k = threadIdx.x % WARP; k < p.window; k += WARP)
        out[k] = k < pivots.y ? pivots.x + k : k < pivots.y + pivots.w ? pivots.z + k - pivots.y : -1;
}

extern "C" __global__ void prepare_v4_prefill_metadata(const __grid_constant__ Params p) {
    const int first = blockIdx.x * blockDim.x, place = first + threadIdx.x;
    if (place < p.num_places) {
        const int row = row_of_place(p, place);
        const Row r = row_for_tokens(p, row);
        write_scalars(p, r, row, place, place - r.first_place);
    }
    if (!p.kv_swa_full_index) return;
    __syncthreads();  // the pivots of this block's tokens are written
    for (int i = first + threadIdx.x / WARP; i < smaller(first + blockDim.x, p.num_places); i += blockDim.x / WARP)
        write_full_index(p, i);
}
