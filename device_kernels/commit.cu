// commit: moves the sequences of a prepared batch on by the tokens that were kept; one thread a row, one launch.
//
// What a row was is read from its ticket, never from the current batch, so a result counts once, in whatever order and however
// often it arrives. A state stands in one row only (MetadataService.set_batch refuses duplicates), so no two threads share one.
#include "ring.cuh"

using namespace zos;

constexpr int RECORD_INT4S = 4;
constexpr int COUNTER_STALE = 0, COUNTER_DUPLICATE = 1, COUNTER_ERRORS = 3;

struct Params {
    int4* records;                 // [capacity, 4]
    long long* token_ids;          // [capacity, tokens_per_step] or null
    const int4* tickets;           // [num_rows]: (state_id, generation, q_start, seqlen_q)
    const int* num_kept;           // [num_rows]
    const bool* finished;          // [num_rows] or null
    const long long* next_tokens;  // [num_rows, tokens_per_step] or null
    unsigned long long* counters;  // [4]: stale, duplicate, deferred, errors
    int capacity;
    int num_rows;
    int tokens_per_step;
    int max_prefill_tokens;
};

__device__ __forceinline__ void count(const Params& p, int counter) { atomicAdd(&p.counters[counter], 1ull); }

extern "C" __global__ void commit(const __grid_constant__ Params p) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= p.num_rows) return;
    const int4 ticket = p.tickets[row];
    int kept = p.num_kept[row];  // these loads do not wait for the ticket
    const bool asked_to_finish = p.finished && p.finished[row];
    const int state_id = ticket.x, q = ticket.w;
    if (q <= 0 || static_cast<unsigned>(state_id) >= static_cast<unsigned>(p.capacity)) return;

    int4* record = p.records + static_cast<long long>(state_id) * RECORD_INT4S;
    int4 head = record[0];     // phase, seqlen_q, q_start, prompt_end
    const int4 tail = record[1];  // swa_valid_start, kv_cached_end, generation, error
    int4 course = record[2];   // head, stop_at, chunk_q, decode_q
    if (tail.z != ticket.y || (head.x != LIVE && head.x != PAUSED)) return count(p, COUNTER_STALE);
    if (head.z != ticket.z) return count(p, COUNTER_DUPLICATE);

    const bool prefilling = head.z < head.w;
    if (prefilling) {
        kept = q;
    } else {
        const int error = kept_error(kept, q, p.tokens_per_step);
        if (error != NO_ERROR) {
            reinterpret_cast<int*>(record)[0] = ERROR;
            if (tail.w != NO_ERROR) return;  // the first error of a state stays
            reinterpret_cast<int*>(record)[7] = error;
            reinterpret_cast<int*>(record)[12] = kept;
            return count(p, COUNTER_ERRORS);
        }
        if (kept == 0) return;  // no result
    }
    kept = kept_before_stop(kept, head.z, course.y);
    course.x = larger(course.x, head.z + q);
    head.z += kept;
    const bool prompt_complete = head.z >= head.w;
    if (prefilling)
        head.y = next_seqlen_q(head.z, head.w, course.z, course.w, p.tokens_per_step, p.max_prefill_tokens);
    const bool at_stop = course.y > 0 && head.z >= course.y;
    if (at_stop || (prompt_complete && asked_to_finish)) head.x = FINISHED;
    if (prompt_complete && p.next_tokens) {
        for (int j = 0; j < p.tokens_per_step; ++j)
            p.token_ids[static_cast<long long>(state_id) * p.tokens_per_step + j] =
                p.next_tokens[static_cast<long long>(row) * p.tokens_per_step + j];
    }
    record[0] = head;
    reinterpret_cast<int*>(record)[8] = course.x;
}
