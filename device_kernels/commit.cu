// commit: moves the sequences of a prepared batch on by the tokens that were kept; one thread a row, one launch.
//
// What a row was is read from its ticket, never from the current batch, so a result counts once, in whatever order and however
// often it arrives. A state stands in one row only (MetadataService.set_batch refuses duplicates), so no two threads share one.
// With a mailbox the step leaves a record of its rows; with a ready queue the block that ends last puts waiting sequences into the
// batch rows of finished ones. Rows that went through a boundary of snapshots are marked.
#include "block.cuh"
#include "results.cuh"

using namespace zos;

constexpr int RECORD_INT4S = 4;
constexpr int COUNTER_STALE = 0, COUNTER_DUPLICATE = 1, COUNTER_ERRORS = 3;

struct Params {
    int4* records;                 // [capacity, 4]
    long long* token_ids;          // [capacity, tokens_per_step] or null
    const int4* tickets;           // [num_rows]: (state_id, generation, q_start, seqlen_q), or (-1, reason, state_id or -1, 0)
    const int* num_kept;           // [num_rows]
    const bool* finished;          // [num_rows] or null
    const long long* next_tokens;  // [num_rows, tokens_per_step] or null
    unsigned long long* counters;  // [4]: stale, duplicate, deferred, errors
    int* batch;                    // [batch_rows]: state ids of the slot's whole batch, or null
    long long* batch_state;        // [8]: version, refused edits, ready entries taken, appended, blocks done; or null
    const int2* ready;             // [num_ready]: (state_id, generation), entry n at n % num_ready; or null
    int* results;                  // [num_results, result_words] or null: record n at n % num_results
    long long* results_state;      // [2]: records committed, records published
    const long long* kept_tokens;  // [num_rows, tokens_per_step] or null
    int* marks;                    // [num_rows] or null: boundary at which the row's state is worth a snapshot, -1 for none
    long long result_words;
    int capacity;
    int num_rows;
    int batch_rows;                // num_rows or more: the batch may have grown since the tickets were written
    int tokens_per_step;
    int max_prefill_tokens;
    int num_ready;
    int num_results;
    int prefill;
    int snapshot_every;            // boundaries are its multiples; 0: there are none
    int window;
    int ring;
};

enum BatchState { VERSION = 0, REFUSED = 1, TAKEN = 2, APPENDED = 3, BLOCKS_DONE = 4 };

struct BatchCounts {
    int version, refused, taken;
};

__device__ __forceinline__ BatchCounts read_batch_counts(const Params& p) {
    return {static_cast<int>(p.batch_state[VERSION]), static_cast<int>(p.batch_state[REFUSED]), static_cast<int>(p.batch_state[TAKEN])};
}

// What a row's result came to.
struct Outcome {
    int state_id;    // -1: the row has none
    int generation;
    int q_start;
    int kept;
    int flags;
};

__device__ __forceinline__ void count(const Params& p, int counter) { atomicAdd(&p.counters[counter], 1ull); }

__device__ __forceinline__ Outcome commit_row(const Params& p, int row) {
    const int4 ticket = p.tickets[row];
    int kept = p.num_kept[row];  // these loads do not wait for the ticket
    const bool asked_to_finish = p.finished && p.finished[row];
    if (p.marks) p.marks[row] = -1;
    const int state_id = ticket.x, q = ticket.w;
    if (q <= 0 || static_cast<unsigned>(state_id) >= static_cast<unsigned>(p.capacity)) {
        if (state_id != -1) return {-1, 0, 0, 0, 0};
        return {ticket.z, 0, 0, 0, ticket.y == TICKET_ERROR ? IS_ERROR : ticket.y == TICKET_DEFERRED ? IS_DEFERRED : 0};
    }

    int4* record = p.records + static_cast<long long>(state_id) * RECORD_INT4S;
    int4 head = record[0];     // phase, seqlen_q, q_start, prompt_end
    const int4 tail = record[1];  // swa_valid_start, kv_cached_end, generation, error
    int4 course = record[2];   // head, stop_at, chunk_q, decode_q
    Outcome outcome = {state_id, ticket.y, ticket.z, 0, 0};
    if (tail.z != ticket.y || (head.x != LIVE && head.x != PAUSED)) {
        count(p, COUNTER_STALE);
        outcome.flags = IS_STALE;
        return outcome;
    }
    if (head.z != ticket.z) {
        count(p, COUNTER_DUPLICATE);
        outcome.flags = IS_DUPLICATE;
        return outcome;
    }
    const bool prefilling = head.z < head.w;
    if (prefilling) {
        kept = q;
    } else {
        const int error = kept_error(kept, q, p.tokens_per_step);
        if (error != NO_ERROR) {
            reinterpret_cast<int*>(record)[0] = ERROR;
            outcome.flags = IS_ERROR;
            if (tail.w != NO_ERROR) return outcome;  // the first error of a state stays
            reinterpret_cast<int*>(record)[7] = error;
            reinterpret_cast<int*>(record)[12] = kept;
            count(p, COUNTER_ERRORS);
            return outcome;
        }
        if (kept == 0) return outcome;  // no result
    }
    kept = kept_before_stop(kept, head.z, course.y);
    course.x = larger(course.x, head.z + q);
    head.z += kept;
    const bool prompt_complete = head.z >= head.w;
    if (prefilling)
        head.y = next_seqlen_q(head.z, head.w, course.z, course.w, p.tokens_per_step, p.max_prefill_tokens, p.snapshot_every);
    if (p.marks) p.marks[row] = snapshot_boundary(ticket.z, head.z, course.x, tail.x, p.window, p.ring, p.snapshot_every);
    const bool at_stop = course.y > 0 && head.z >= course.y;
    if (at_stop || (prompt_complete && asked_to_finish)) head.x = FINISHED;
    if (prompt_complete && p.next_tokens) {
        for (int j = 0; j < p.tokens_per_step; ++j)
            p.token_ids[static_cast<long long>(state_id) * p.tokens_per_step + j] =
                p.next_tokens[static_cast<long long>(row) * p.tokens_per_step + j];
    }
    record[0] = head;
    reinterpret_cast<int*>(record)[8] = course.x;
    outcome.q_start = head.z;
    outcome.kept = kept;
    outcome.flags = head.x == FINISHED ? IS_FINISHED : 0;
    return outcome;
}

__device__ __forceinline__ void write_outcome(const Params& p, int* record, int row, const Outcome& outcome) {
    int* rows = record + HEADER_WORDS;
    rows[STATE_ID * p.num_rows + row] = outcome.state_id;
    rows[GENERATION * p.num_rows + row] = outcome.generation;
    rows[Q_START * p.num_rows + row] = outcome.q_start;
    rows[KEPT * p.num_rows + row] = outcome.kept;
    rows[FLAGS * p.num_rows + row] = outcome.flags;
    rows[NEXT_STATE_ID * p.num_rows + row] = p.batch ? p.batch[row] : outcome.state_id;
    if (!p.kept_tokens) return;
    long long* tokens = reinterpret_cast<long long*>(rows + ROW_WORDS * p.num_rows) + static_cast<long long>(row) * p.tokens_per_step;
    for (int j = 0; j < p.tokens_per_step; ++j)
        tokens[j] = j < outcome.kept ? p.kept_tokens[static_cast<long long>(row) * p.tokens_per_step + j] : -1;
}

// Takes entries off the ready queue until `wanted` of them can run; the whole block. Returns how many there are, first in `taken`.
// An entry is passed over for good when its sequence is over or of another generation, or stands in the batch already.
__device__ int take_ready(const Params& p, int wanted, int* taken) {
    __shared__ int candidates[WARP];  // -1: cannot run
    long long next = p.batch_state[TAKEN];
    const long long end = p.batch_state[APPENDED];
    int found = 0;
    while (found < wanted && next < end) {
        __syncthreads();  // the array is free again
        if (threadIdx.x < WARP) {
            int2 entry = {-1, 0};
            if (next + threadIdx.x < end) entry = p.ready[(next + threadIdx.x) % p.num_ready];
            if (static_cast<unsigned>(entry.x) < static_cast<unsigned>(p.capacity)) {
                const int* record = reinterpret_cast<const int*>(p.records + static_cast<long long>(entry.x) * RECORD_INT4S);
                if (__ldcg(record) != LIVE || __ldcg(record + 6) != entry.y) entry.x = -1;
            } else {
                entry.x = -1;
            }
            candidates[threadIdx.x] = entry.x;
        }
        __syncthreads();
        for (int i = 0; i < WARP && found < wanted && next < end; ++i, ++next) {
            const int state_id = candidates[i];
            if (state_id < 0) continue;
            bool there = false;
            for (int row = threadIdx.x; row < p.batch_rows; row += blockDim.x) there |= p.batch[row] == state_id;
            for (int t = threadIdx.x; t < found; t += blockDim.x) there |= taken[t] == state_id;
            if (__syncthreads_or(there)) continue;
            if (threadIdx.x == 0) taken[found] = state_id;
            ++found;
            __syncthreads();
        }
    }
    __syncthreads();  // everyone has read where the queue begins
    if (threadIdx.x == 0) p.batch_state[TAKEN] = next;
    return found;
}

// Puts waiting sequences into the batch rows of finished ones, in row order, where the batch still holds what was prepared.
__device__ void refill(const Params& p, int* record) {
    __shared__ int taken[MAX_WARPS * WARP];
    bool changed = false;
    for (int first = 0; first < p.num_rows; first += blockDim.x) {
        const int row = first + threadIdx.x;
        bool over = false;
        if (row < p.num_rows) {
            const int4 ticket = p.tickets[row];
            const int state_id = p.batch[row], prepared = ticket.x >= 0 ? ticket.x : ticket.z;
            if (state_id == prepared && static_cast<unsigned>(state_id) < static_cast<unsigned>(p.capacity)) {
                const int phase = __ldcg(reinterpret_cast<const int*>(p.records + static_cast<long long>(state_id) * RECORD_INT4S));
                over = phase == FINISHED || phase == ERROR;
            }
        }
        int wanted;
        const int rank = rank_in_block(over, &wanted);
        if (wanted == 0) continue;
        const int found = take_ready(p, wanted, taken);
        if (over && rank < found) {
            p.batch[row] = taken[rank];
            if (record) {
                record[HEADER_WORDS + NEXT_STATE_ID * p.num_rows + row] = taken[rank];
                int* flags = record + HEADER_WORDS + FLAGS * p.num_rows + row;
                *flags = __ldcg(flags) | IS_REFILLED;  // another block may have written it
            }
        }
        changed |= found > 0;
        __syncthreads();  // the batch is as the next rows' candidates must see it
    }
    if (threadIdx.x == 0 && changed) ++p.batch_state[VERSION];
    __syncthreads();
}

__device__ __forceinline__ int count_in_warp(bool set) { return __popc(__ballot_sync(ALL_LANES, set)); }

// `own_flags`: of this thread's row, which is all there is where the launch has one block; `known`: the batch's state, as far as this
// launch cannot have changed it.
__device__ void write_header(const Params& p, int* record, long long step, int own_flags, const BatchCounts& known) {
    int4 counts = {};
    for (int first = 0; first < p.num_rows; first += blockDim.x) {
        const int row = first + threadIdx.x;
        int flags = own_flags;  // nobody is without a row and has any
        if (gridDim.x > 1) flags = row < p.num_rows ? __ldcg(record + HEADER_WORDS + FLAGS * p.num_rows + row) : 0;
        counts.x += count_in_warp(flags & IS_ERROR), counts.y += count_in_warp(flags & IS_DEFERRED);
        counts.z += count_in_warp(flags & IS_STALE), counts.w += count_in_warp(flags & IS_DUPLICATE);
    }
    counts = counts_in_block(counts);
    if (threadIdx.x != 0) return;
    const BatchCounts now = p.ready ? read_batch_counts(p) : known;
    *reinterpret_cast<long long*>(record + STEP) = step;
    record[ROWS] = p.num_rows;
    record[PREFILL] = p.prefill;
    record[BATCH_VERSION] = now.version;
    record[BATCHES_REFUSED] = now.refused;
    record[READY_TAKEN] = now.taken;
    record[ERRORS] = counts.x, record[DEFERRED] = counts.y, record[STALE] = counts.z, record[DUPLICATE] = counts.w;
    record[TOKENS_PER_ROW] = p.kept_tokens ? p.tokens_per_step : 0;
    p.results_state[0] = step;
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS* WARP, 1) commit(const __grid_constant__ Params p) {
    wait_for_predecessor();
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    const long long step = p.results ? p.results_state[0] + 1 : 0;
    BatchCounts counts = {};
    if (p.results && threadIdx.x == 0) counts = read_batch_counts(p);  // under way beside the row's own loads
    Outcome outcome = {-1, 0, 0, 0, 0};
    if (row < p.num_rows) outcome = commit_row(p, row);
    if (!p.results && !p.ready) return;

    int* record = p.results ? p.results + step % p.num_results * p.result_words : nullptr;
    if (record && row < p.num_rows) write_outcome(p, record, row, outcome);
    if (!ends_last(p.batch_state + BLOCKS_DONE)) return;
    if (p.ready) refill(p, record);
    if (record) write_header(p, record, step, outcome.flags, counts);
}
