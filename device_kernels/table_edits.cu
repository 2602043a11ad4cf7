// apply_table_edits: applies one flush of staged edits to the sequence records and to the batches, in one launch.
//
// The buffer is read where the host wrote it (mapped pinned memory). Its first num_edits rows are record edits, sorted by state
// and within a state in call order: the thread of a state's first edit applies all of that state's. Then num_batches rows follow,
// one block each.
#include "ring.cuh"

using namespace zos;

constexpr int EDIT_WORDS = 16;
constexpr int RECORD_INT4S = 4;

enum Edit { ADMIT = 1, RELEASE = 2, RESET = 3, PAUSE = 4, RESUME = 5, SET_SEQLEN_Q = 6, SET_VALID_START = 7 };  // 0: no edit

struct Params {
    int4* records;         // [capacity, 4]
    long long* token_ids;  // [capacity, tokens_per_step] or null
    int* batches;          // [batch rows, batch_stride]
    const int* edits;      // [num_edits + num_batches, 16], then the payload that they point into
    long long num_words;   // of edits
    long long batch_stride;
    int capacity;
    int num_batch_rows;
    int num_edits;
    int num_batches;
    int tokens_per_step;
    int max_prefill_tokens;
};

struct Record {
    int4 a;  // phase, seqlen_q, q_start, prompt_end
    int4 b;  // swa_valid_start, kv_cached_end, generation, error
    int4 c;  // head, stop_at, chunk_q, decode_q
    int4 d;  // error_value, -, -, -
};

// Tokens of the state's next step: from the payload at a word of the buffer, or zeros when there are none.
__device__ void set_tokens(const Params& p, int state_id, int payload_at) {
    if (!p.token_ids) return;
    const bool given = payload_at >= 0 && payload_at / 2 + static_cast<long long>(p.tokens_per_step) <= p.num_words / 2;
    const long long* tokens = reinterpret_cast<const long long*>(p.edits) + (given ? payload_at / 2 : 0);
    for (int j = 0; j < p.tokens_per_step; ++j)
        p.token_ids[static_cast<long long>(state_id) * p.tokens_per_step + j] = given ? tokens[j] : 0;
}

__device__ void apply_edit(const Params& p, Record& r, const int* edit) {
    const int state_id = edit[0], value = edit[2];
    switch (edit[1]) {
        case ADMIT:
            r.a = {LIVE, value, edit[3], edit[4]};
            r.b = {edit[5], edit[6], r.b.z + 1, NO_ERROR};
            r.c = {edit[3], edit[7], edit[8], edit[9]};
            r.d = {0, 0, 0, 0};
            set_tokens(p, state_id, edit[10]);
            break;
        case RELEASE:
            r.a.x = FREE;
            r.b.z += 1;
            r.b.w = NO_ERROR;
            r.d.x = 0;
            break;
        case RESET:
            if (r.a.x != LIVE && r.a.x != PAUSED && r.a.x != ERROR) break;
            r.a = {LIVE, next_seqlen_q(0, value, r.c.z, r.c.w, p.tokens_per_step, p.max_prefill_tokens), 0, value};
            r.b = {0, 0, r.b.z + 1, NO_ERROR};
            r.c.x = 0;
            r.d.x = 0;
            set_tokens(p, state_id, -1);
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
    }
}

extern "C" __global__ void apply_table_edits(const __grid_constant__ Params p) {
    const int edit_blocks = (p.num_edits + blockDim.x - 1) / blockDim.x;
    if (blockIdx.x >= edit_blocks) {  // (batch row, -, payload position, ids)
        const int* edit = p.edits + static_cast<long long>(p.num_edits + blockIdx.x - edit_blocks) * EDIT_WORDS;
        const int num_ids = edit[3];
        const bool sound = edit[0] >= 0 && edit[0] < p.num_batch_rows && num_ids <= p.batch_stride && edit[2] >= 0 &&
                           edit[2] + static_cast<long long>(num_ids) <= p.num_words;
        if (!sound) return;  // skipped, as everything that would read or write outside
        const int* ids = p.edits + edit[2];
        int* batch = p.batches + edit[0] * p.batch_stride;
        for (int row = threadIdx.x; row < num_ids; row += blockDim.x) batch[row] = ids[row];
        return;
    }
    const int first = blockIdx.x * blockDim.x + threadIdx.x;
    if (first >= p.num_edits) return;
    const int* edit = p.edits + static_cast<long long>(first) * EDIT_WORDS;
    const int state_id = edit[0];
    if (static_cast<unsigned>(state_id) >= static_cast<unsigned>(p.capacity)) return;
    if (first > 0 && edit[-EDIT_WORDS] == state_id) return;  // the thread of this state's first edit applies it

    int4* record = p.records + static_cast<long long>(state_id) * RECORD_INT4S;
    Record r = {record[0], record[1], record[2], record[3]};
    for (int i = first; i < p.num_edits && edit[0] == state_id; ++i, edit += EDIT_WORDS) apply_edit(p, r, edit);
    record[0] = r.a;
    record[1] = r.b;
    record[2] = r.c;
    record[3] = r.d;
}
