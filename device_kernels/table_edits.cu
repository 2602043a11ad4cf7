// apply_table_edits: applies one flush of staged edits to the sequence records, the batches and the ready queues; one block.
//
// A flush is a buffer that the host wrote in mapped pinned memory. The launch takes the buffer after that of the launch before it, so
// that a launch captured in a CUDA graph finds the flush which the host packed for it, and none packed later. A buffer holds a
// header, num_edits rows of record edits, sorted by state and within a state in call order (the thread of a state's first edit applies
// all of that state's), num_batches rows of batch edits, and what these rows point into.
#include "ring.cuh"

using namespace zos;

constexpr int EDIT_WORDS = 16;
constexpr int RECORD_INT4S = 4;
constexpr int BATCH_STATE_WORDS = 8;
constexpr int STAGED_ROWS = 256;  // rows of a buffer that are brought into shared memory
constexpr int EARLY_ROWS = 16;    // of them, those read along with the header: a trip to host memory costs a microsecond

enum HeaderWord { NUM_EDITS = 0, NUM_BATCHES = 1, HEADER_WORDS = 16 };
enum Edit { ADMIT = 1, RELEASE = 2, RESET = 3, PAUSE = 4, RESUME = 5, SET_SEQLEN_Q = 6, SET_VALID_START = 7, APPEND_READY = 8, FORK = 9 };  // 0: none
enum BatchEdit { SET_BATCH = 0, SET_APPENDED = 1 };
enum BatchState { VERSION = 0, REFUSED = 1, TAKEN = 2, APPENDED = 3 };

struct Params {
    int4* records;                // [capacity, 4]
    long long* token_ids;         // [capacity, tokens_per_step] or null
    int* batches;                 // [num_batch_rows, batch_stride]
    const int* edits;             // [num_buffers, buffer_words]
    long long* batch_states;      // [num_batch_rows, 8]: version, refused edits, ready entries taken, appended
    int2* ready;                  // [num_batch_rows, num_ready]: (state_id, generation), or null
    long long* applied;           // [1]: launches so far, in device memory
    long long* applied_on_host;   // [1]: the same, for the host
    long long buffer_words;
    long long batch_stride;
    int capacity;
    int num_batch_rows;
    int num_buffers;
    int num_ready;
    int tokens_per_step;
    int max_prefill_tokens;
    int snapshot_every;           // first chunks pass no multiple of it; 0: they may
};

struct Record {
    int4 a;  // phase, seqlen_q, q_start, prompt_end
    int4 b;  // swa_valid_start, kv_cached_end, generation, error
    int4 c;  // head, stop_at, chunk_q, decode_q
    int4 d;  // error_value, -, -, -
};

// Tokens of the state's next step: from the payload at a word of the buffer, or zeros when there are none.
__device__ void set_tokens(const Params& p, const int* buffer, int state_id, int payload_at) {
    if (!p.token_ids) return;
    const bool given = payload_at >= 0 && payload_at / 2 + static_cast<long long>(p.tokens_per_step) <= p.buffer_words / 2;
    const long long* tokens = reinterpret_cast<const long long*>(buffer) + (given ? payload_at / 2 : 0);
    for (int j = 0; j < p.tokens_per_step; ++j)
        p.token_ids[static_cast<long long>(state_id) * p.tokens_per_step + j] = given ? tokens[j] : 0;
}

// All that the table holds of the source, but for the generation.
__device__ void fork(const Params& p, Record& r, int state_id, int source) {
    const int4* record = p.records + static_cast<long long>(source) * RECORD_INT4S;
    const int generation = r.b.z + 1;
    r = {record[0], record[1], record[2], record[3]};
    r.b.z = generation;
    for (int j = 0; p.token_ids && j < p.tokens_per_step; ++j)
        p.token_ids[static_cast<long long>(state_id) * p.tokens_per_step + j] =
            p.token_ids[static_cast<long long>(source) * p.tokens_per_step + j];
}

__device__ void apply_edit(const Params& p, const int* buffer, Record& r, const int* edit) {
    const int state_id = edit[0], value = edit[2];
    switch (edit[1]) {
        case ADMIT:
            r.a = {LIVE, value, edit[3], edit[4]};
            r.b = {edit[5], edit[6], r.b.z + 1, NO_ERROR};
            r.c = {edit[3], edit[7], edit[8], edit[9]};
            r.d = {0, 0, 0, 0};
            set_tokens(p, buffer, state_id, edit[10]);
            break;
        case RELEASE:
            r.a.x = FREE;
            r.b.z += 1;
            r.b.w = NO_ERROR;
            r.d.x = 0;
            break;
        case RESET:
            if (r.a.x != LIVE && r.a.x != PAUSED && r.a.x != ERROR) break;
            r.a = {LIVE, next_seqlen_q(0, value, r.c.z, r.c.w, p.tokens_per_step, p.max_prefill_tokens, p.snapshot_every), 0, value};
            r.b = {0, 0, r.b.z + 1, NO_ERROR};
            r.c.x = 0;
            r.d.x = 0;
            set_tokens(p, buffer, state_id, -1);
            break;
        case PAUSE:
            if (r.a.x == LIVE) r.a.x = PAUSED;
            break;
        case RESUME:
            if (r.a.x == PAUSED) r.a.x = LIVE;
            break;
        case SET_SEQLEN_Q:
            r.a.y = value;
            break;
        case SET_VALID_START:
            r.b.x = value;
            break;
        case APPEND_READY:  // (state_id, APPEND_READY, batch row, place in its queue)
            if (p.ready && value >= 0 && value < p.num_batch_rows && edit[3] >= 0 && edit[3] < p.num_ready)
                p.ready[value * static_cast<long long>(p.num_ready) + edit[3]] = {state_id, r.b.z};
            break;
        case FORK:  // (state_id, FORK, source): the host packs no edit of the source beside it, so nobody writes what is read here
            if (static_cast<unsigned>(value) < static_cast<unsigned>(p.capacity)) fork(p, r, state_id, value);
            break;
    }
}

// All edits of the state whose first one is row `first`; `row_at` finds a row of the buffer.
template <class RowAt>
__device__ void apply_edits_of_state(const Params& p, const int* buffer, int first, int num_edits, RowAt row_at) {
    const int state_id = row_at(first)[0];
    if (static_cast<unsigned>(state_id) >= static_cast<unsigned>(p.capacity)) return;
    if (first > 0 && row_at(first - 1)[0] == state_id) return;  // the thread of this state's first edit applies it
    int4* record = p.records + static_cast<long long>(state_id) * RECORD_INT4S;
    Record r = {record[0], record[1], record[2], record[3]};
    for (int i = first; i < num_edits && row_at(i)[0] == state_id; ++i) apply_edit(p, buffer, r, row_at(i));
    record[0] = r.a;
    record[1] = r.b;
    record[2] = r.c;
    record[3] = r.d;
}

// (batch row, SET_BATCH, payload position, ids, expected number of changes or -1), or (batch row, SET_APPENDED, count's low, high word).
__device__ void apply_batch_edit(const Params& p, const int* buffer, const int* edit) {
    if (edit[0] < 0 || edit[0] >= p.num_batch_rows) return;  // skipped, as everything that would read or write outside
    long long* state = p.batch_states + edit[0] * static_cast<long long>(BATCH_STATE_WORDS);
    if (edit[1] == SET_APPENDED) {
        if (threadIdx.x == 0) state[APPENDED] = static_cast<long long>(edit[3]) << 32 | static_cast<unsigned>(edit[2]);
        return;
    }
    const int num_ids = edit[3], expected = edit[4];
    if (edit[1] != SET_BATCH || num_ids < 0 || num_ids > p.batch_stride || edit[2] < 0 ||
        edit[2] + static_cast<long long>(num_ids) > p.buffer_words)
        return;
    // Every set_batch counts here, refused or not: one that was staged on top of another finds the number that it expects only if
    // no refill came in between, whatever became of the other.
    const bool refused = expected >= 0 && expected != static_cast<int>((state[VERSION] + state[REFUSED]) & INT32_LARGEST);
    __syncthreads();  // every thread has read the version
    if (threadIdx.x == 0) ++state[refused ? REFUSED : VERSION];
    if (refused) return;
    int* batch = p.batches + edit[0] * p.batch_stride;
    // Padding behind the ids: a later step of more rows, or a late refill, must not find a former batch there.
    for (int row = threadIdx.x; row < p.batch_stride; row += blockDim.x) batch[row] = row < num_ids ? buffer[edit[2] + row] : -1;
}

extern "C" __global__ void apply_table_edits(const __grid_constant__ Params p) {
    wait_for_predecessor();
    __shared__ int4 staged[STAGED_ROWS * EDIT_WORDS / 4];
    const long long launch = p.applied[0];
    const int* buffer = p.edits + launch % p.num_buffers * p.buffer_words;
    const int4* rows = reinterpret_cast<const int4*>(buffer + HEADER_WORDS);
    for (int i = threadIdx.x; i < EARLY_ROWS * EDIT_WORDS / 4; i += blockDim.x) staged[i] = rows[i];
    int num_edits = buffer[NUM_EDITS], num_batches = buffer[NUM_BATCHES];
    if (num_edits < 0 || num_batches < 0 ||
        static_cast<long long>(num_edits) + num_batches > (p.buffer_words - HEADER_WORDS) / EDIT_WORDS)
        num_edits = num_batches = 0;  // no buffer of the host's: read no further than it reaches
    const int in_shared = smaller(num_edits + num_batches, STAGED_ROWS);
    for (int i = EARLY_ROWS * EDIT_WORDS / 4 + threadIdx.x; i < in_shared * EDIT_WORDS / 4; i += blockDim.x) staged[i] = rows[i];
    __syncthreads();
    const auto row_at = [&](int i) {
        return i < STAGED_ROWS ? reinterpret_cast<const int*>(staged) + i * EDIT_WORDS
                               : buffer + HEADER_WORDS + static_cast<long long>(i) * EDIT_WORDS;
    };
    for (int i = threadIdx.x; i < num_edits; i += blockDim.x) apply_edits_of_state(p, buffer, i, num_edits, row_at);
    for (int i = 0; i < num_batches; ++i) {
        __syncthreads();  // what the edit before wrote is there
        apply_batch_edit(p, buffer, row_at(num_edits + i));
    }
    __syncthreads();  // nobody reads the buffer any more
    if (threadIdx.x == 0) {
        p.applied[0] = launch + 1;
        *const_cast<volatile long long*>(p.applied_on_host) = launch + 1;
    }
}
