// prepare_v4_prefill_metadata: attention metadata of a step whose rows may be chunks of any length, always packed.
//
// Work goes by token place, so that long and short rows cost alike: a lane has a place, and a warp finds the rows of its 32 places by
// walking the batch, 32 rows at a time. Two warps share 32 places: one writes where their windows are, one what the tokens are. Where
// kv_swa_full_index is wanted a block has 32 places, and its warps share their index once the first has found where it is. The first
// blocks write what belongs to a row: its ticket, its load plan, where its tokens begin. One launch.
//
// A batch too long for every warp to walk takes two: `prepare_prefill_rows`, one block, does the rows, and `prepare_prefill_tokens`
// finds the row of a place in cu_seqlens_q.
#include "metadata.cuh"

using namespace zos;

constexpr int PARTS = 2, INDEX_PARTS = 8;  // warps that share 32 places, without and with their full index: then a block

__device__ __forceinline__ void write_prefill_row(const Params& p, const Row& r, int row) {
    write_row(p, r, row);
    write_load_plan(p.swa_load_plan + row * 3ll, row * p.window, r.live ? r.state_id : -1, r.q_start, r.swa_valid_start, p.window,
                    p.ring);
    p.last_token_index[row] = r.live ? r.first_place + r.places - 1 : -1;
}

__device__ __forceinline__ void write_sums(const Params& p, int places, int live_tokens, int deferred) {
    p.num_tokens[0] = live_tokens;
    p.cu_seqlens_q[p.num_rows] = places;
    if (deferred > 0) atomicAdd(&p.counters[COUNTER_DEFERRED], static_cast<unsigned long long>(deferred));
}

// kv_swa_full_index of one token by one warp: its pivots expanded, history rows first, then the chunk's own, then -1.
__device__ __forceinline__ void write_full_index(const Params& p, int4 pivots, int place) {
    int* out = p.kv_swa_full_index + static_cast<long long>(place) * p.window;
    const auto index_at = [&](int k) {
        return k < pivots.y ? pivots.x + k : k < pivots.y + pivots.w ? pivots.z + k - pivots.y : -1;
    };
    const int lane = threadIdx.x % WARP;
    if (p.vector_index) {
#pragma unroll 1
        for (int k = lane * 4; k < p.window; k += WARP * 4)
            *reinterpret_cast<int4*>(out + k) = {index_at(k), index_at(k + 1), index_at(k + 2), index_at(k + 3)};
    } else {
#pragma unroll 1
        for (int k = lane; k < p.window; k += WARP) out[k] = index_at(k);
    }
}

__device__ __forceinline__ int parts_of(const Params& p) { return p.kv_swa_full_index ? INDEX_PARTS : PARTS; }

// What a warp, `part` of the `parts` that share 32 places, writes of them; `place` is the lane's. The first warp and the last know
// `r` and `row`, those of that place.
__device__ __forceinline__ void write_places(const Params& p, const Row& r, int row, int place, int part, int parts) {
    __shared__ int4 pivots[WARP];
    const int lane = threadIdx.x % WARP, j = place - r.first_place;
    if (p.kv_swa_full_index) {
        if (part == 0) pivots[lane] = pivots_of(p, r, row, j);
        __syncthreads();
    }
    if (part == 0 && place < p.num_places) write_window(p, r, row, place, j);
    if (part == parts - 1 && place < p.num_places) write_token(p, r, row, place, j);
    if (!p.kv_swa_full_index) return;
    for (int i = part; i < WARP && place - lane + i < p.num_places; i += parts) write_full_index(p, pivots[i], place - lane + i);
}

// ---- one launch -----------------------------------------------------------------------------------------------------------

// A warp's walk through the batch. Sums of places are capped at num_places + 1, "too many", so that they cannot overflow.
struct Walk {
    unsigned places;  // of the rows walked so far
    int live_tokens;  // this lane's share of the live tokens
    int deferred;     // and of the deferred rows
};

struct WalkedRow {
    Row row;
    unsigned end;  // place after its last
};

// The next 32 rows, a lane each.
__device__ __forceinline__ WalkedRow next_rows(const Params& p, int first_row, Walk* walk) {
    const int lane = threadIdx.x % WARP;
    const unsigned most = static_cast<unsigned>(p.num_places);
    Row r = row_of_state(p, first_row + lane, state_at(p, first_row + lane));
    unsigned end = min(static_cast<unsigned>(r.places), most + 1);
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const unsigned other = __shfl_up_sync(ALL_LANES, end, step);
        if (lane >= step) end = min(end + other, most + 1);
    }
    end = min(end + walk->places, most + 1);
    const unsigned before = __shfl_up_sync(ALL_LANES, end, 1);
    r.first_place = static_cast<int>(min(lane == 0 ? walk->places : before, most));
    walk->places = __shfl_sync(ALL_LANES, end, WARP - 1);
    walk->deferred += r.live && end > most;
    r.live = r.live && end <= most;
    walk->live_tokens += r.live ? r.places : 0;
    return {r, end};
}

// The row of a lane's place, all padding for the tail, and its number.
__device__ __forceinline__ Row walk_to_place(const Params& p, int place, int* row) {
    Walk walk = {};
    Row found = {-1, 0, 0, 0, 0, 0, 0, NO_ERROR, NO_ERROR, 0, 0, false};
    *row = -1;
    const unsigned last_place = __shfl_sync(ALL_LANES, place, WARP - 1);
    for (int first_row = 0; first_row < p.num_rows && walk.places <= last_place; first_row += WARP) {
        const unsigned begin = walk.places;
        const WalkedRow walked = next_rows(p, first_row, &walk);
        int source = 0;  // lanes whose rows end at or before the place: the lane of the place's row
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2)
            if (__shfl_sync(ALL_LANES, walked.end, source + step - 1) <= place) source += step;
        Row r = found;
        r.state_id = __shfl_sync(ALL_LANES, walked.row.state_id, source);
        r.q_start = __shfl_sync(ALL_LANES, walked.row.q_start, source);
        r.prompt_end = __shfl_sync(ALL_LANES, walked.row.prompt_end, source);
        r.swa_valid_start = __shfl_sync(ALL_LANES, walked.row.swa_valid_start, source);
        r.kv_cached_end = __shfl_sync(ALL_LANES, walked.row.kv_cached_end, source);
        r.places = __shfl_sync(ALL_LANES, walked.row.places, source);
        r.first_place = __shfl_sync(ALL_LANES, walked.row.first_place, source);
        r.live = __shfl_sync(ALL_LANES, static_cast<int>(walked.row.live), source);
        if (begin <= place && place < walk.places) {
            found = r;
            *row = first_row + source;
        }
    }
    return found;
}

// Rows first_row … first_row + 31, a lane each; the warp of the last rows has walked them all and sums up.
__device__ __forceinline__ void write_rows(const Params& p, int first_row) {
    Walk walk = {};
    Row r = {};
    for (int before = 0; before <= first_row; before += WARP) r = next_rows(p, before, &walk).row;
    const int row = first_row + threadIdx.x % WARP;
    if (row < p.num_rows) write_prefill_row(p, r, row);
    if (first_row + WARP < p.num_rows) return;
    const int live_tokens = __reduce_add_sync(ALL_LANES, walk.live_tokens);
    const int deferred = __reduce_add_sync(ALL_LANES, walk.deferred);
    if (row == first_row)
        write_sums(p, static_cast<int>(min(walk.places, static_cast<unsigned>(p.num_places))), live_tokens, deferred);
}

extern "C" __global__ void prepare_v4_prefill_metadata(const __grid_constant__ Params p) {
    wait_for_predecessor();
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, parts = parts_of(p);
    const int row_warps = larger((p.num_rows + WARP - 1) / WARP, 1), row_blocks = (row_warps + warps - 1) / warps;
    if (blockIdx.x < row_blocks) {
        const int row_warp = blockIdx.x * warps + warp;
        if (row_warp < row_warps) write_rows(p, row_warp * WARP);
        return;
    }
    const int part = warp % parts;
    const int place = ((blockIdx.x - row_blocks) * warps + warp) / parts * WARP + threadIdx.x % WARP;
    int row = -1;
    Row r = {};
    if (part == 0 || part == parts - 1) r = walk_to_place(p, place, &row);
    write_places(p, r, row, place, part, parts);
}

// ---- two launches ---------------------------------------------------------------------------------------------------------

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
    wait_for_predecessor();
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
        Row r = row_of_state(p, row, state_of_row(p, row));
        const bool fits = place + r.places <= p.num_places;
        r.first_place = place < p.num_places ? static_cast<int>(place) : p.num_places;
        deferred += r.live && !fits;
        r.live = r.live && fits;
        live += r.live ? r.places : 0;
        write_prefill_row(p, r, row);
        place += r.places;
    }
    live = block_sum(live, live_partial);
    deferred = block_sum(deferred, deferred_partial);
    if (threadIdx.x == 0)
        write_sums(p, total < p.num_places ? static_cast<int>(total) : p.num_places, live, deferred);
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

extern "C" __global__ void prepare_prefill_tokens(const __grid_constant__ Params p) {
    wait_for_predecessor();
    const int warp = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, parts = parts_of(p), part = warp % parts;
    const int place = warp / parts * WARP + threadIdx.x % WARP;
    int row = -1;
    Row r = {};
    if (part == 0 || part == parts - 1) {
        row = row_of_place(p, place);
        r = row_for_tokens(p, row);
    }
    write_places(p, r, row, place, part, parts);
}
