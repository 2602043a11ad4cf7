// prefill_tail: of a prepared prefill, the packed sub-batch of each prompt's last W tokens, for layers that run on those alone.
//
// A thread has a token place. Each block walks the batch, a row a thread and round, so that it knows the places of all rows without
// waiting for another block; the rounds share out among the blocks what is written by row.
#include "metadata.cuh"

using namespace zos;

constexpr int THREADS = 256;

struct TailParams {
    const int4* records;             // [capacity, 4]
    const int4* tickets;             // [num_rows]: (state_id, generation, q_start, seqlen_q), or (-1, reason, state_id or -1, 0)
    const int* batch_cu_seqlens_q;   // [num_rows + 1]: first token of each row in the whole step
    long long* token_index;          // [num_places]: into the step's tokens
    long long* positions;            // [num_places]
    int4* kv_swa_full_index_pivots;  // [num_places]: as in Params; section 2 holds the tail's own tokens
    int* swa_len;                    // [num_places]
    long long* swa_write_slot;       // [num_places]
    int* token_row;                  // [num_places]
    int* cu_seqlens_q;               // [num_rows + 1]
    int* num_tokens;                 // [1]
    int4* swa_load_plan;             // [num_rows, 3]: (src state_id, src ring slot, dst row, rows)
    int* swa_valid_start;            // [num_rows]
    long long* last_token_index;     // [num_rows]: into the tail's tokens
    int capacity;
    int num_rows;
    int num_places;
    int window;
    int tokens_per_step;
    Divisor ring;
};

struct TailRow {
    int state_id;     // -1: the row has no tail
    int begin;        // its first position
    int valid_start;
    int places;
    int first_index;  // of its first token in the whole step
};

__device__ __forceinline__ TailRow tail_of_row(const TailParams& p, int row) {
    const TailRow none = {-1, 0, 0, 0, 0};
    if (row >= p.num_rows) return none;
    const int4 ticket = p.tickets[row];
    const int state_id = ticket.x, q_start = ticket.z, q = ticket.w;
    if (q <= 0 || static_cast<unsigned>(state_id) >= static_cast<unsigned>(p.capacity)) return none;
    const int4* record = p.records + static_cast<long long>(state_id) * RECORD_INT4S;
    const int prompt_end = record[0].w, valid_start = record[1].x;
    const int begin = tail_begin(q_start, q, prompt_end, p.window, p.tokens_per_step);
    const int places = q_start + q - begin;
    if (places <= 0) return none;
    return {state_id, begin, tail_valid_start(valid_start, q_start, q, prompt_end, p.window, p.tokens_per_step), places,
            p.batch_cu_seqlens_q[row] + (begin - q_start)};
}

__device__ __forceinline__ void write_tail_row(const TailParams& p, const TailRow& r, int row, int first_place) {
    p.cu_seqlens_q[row] = first_place;
    p.swa_valid_start[row] = r.valid_start;
    p.last_token_index[row] = r.places > 0 ? first_place + r.places - 1 : -1;
    write_load_plan(p.swa_load_plan + row * 3ll, row * p.window, r.state_id, r.begin, r.valid_start, p.window, p.ring);
}

__device__ __forceinline__ void write_token(const TailParams& p, const TailRow& r, int row, int place, int first_place) {
    const int j = place - first_place, position = r.begin + j;
    p.token_index[place] = r.first_index + j;
    p.positions[place] = position;
    p.kv_swa_full_index_pivots[place] =
        pivots_at(position, r.begin, r.valid_start, p.window, row * p.window, p.num_rows * p.window + first_place);
    p.swa_len[place] = position - window_begin(position, p.window, r.valid_start) + 1;
    p.swa_write_slot[place] = r.state_id * p.ring.divisor + ring_slot(position, p.ring);
    p.token_row[place] = row;
}

__device__ __forceinline__ void pad_token(const TailParams& p, int place) {
    p.token_index[place] = -1;
    p.positions[place] = 0;
    p.kv_swa_full_index_pivots[place] = {0, 0, 0, 0};
    p.swa_len[place] = 0;
    p.swa_write_slot[place] = -1;
    p.token_row[place] = -1;
}

extern "C" __global__ void __launch_bounds__(THREADS) prefill_tail(const __grid_constant__ TailParams p) {
    wait_for_predecessor();
    __shared__ TailRow rows[THREADS];
    __shared__ int ends[THREADS];             // place after each row's last, within the round
    __shared__ int of_warp[THREADS / WARP];   // places of a warp's rows
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int place = blockIdx.x * THREADS + thread;
    int walked = 0;  // places of the rows of the rounds before
    for (int round = 0; round * THREADS < p.num_rows; ++round) {
        const int row = round * THREADS + thread;
        const TailRow r = tail_of_row(p, row);
        int before = lanes_before(r.places);
        if (lane == WARP - 1) of_warp[warp] = before + r.places;
        __syncthreads();  // after it the other arrays are free again; of_warp is since the round before's second
        int total = 0;
#pragma unroll
        for (int w = 0; w < THREADS / WARP; ++w) {
            if (w < warp) before += of_warp[w];
            total += of_warp[w];
        }
        rows[thread] = r;
        ends[thread] = before + r.places;
        __syncthreads();
        if (row < p.num_rows && round % gridDim.x == blockIdx.x) write_tail_row(p, r, row, walked + before);
        const int sought = place - walked;
        if (sought >= 0 && sought < total && place < p.num_places) {
            int source = 0;  // rows that end at or before the place: the place's row
#pragma unroll
            for (int step = THREADS / 2; step > 0; step /= 2)
                if (ends[source + step - 1] <= sought) source += step;
            const TailRow its = rows[source];
            write_token(p, its, round * THREADS + source, place, walked + ends[source] - its.places);
        }
        walked += total;
    }
    if (place >= walked && place < p.num_places) pad_token(p, place);
    if (place == 0) p.num_tokens[0] = p.cu_seqlens_q[p.num_rows] = walked;
}
