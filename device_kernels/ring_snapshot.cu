// swa_ring_snapshot: copies the stored part of each marked row's state into a free snapshot slot, and tells the host.
//
// Two launches, so that all blocks of the second work on one plan, whatever the host gives back meanwhile. The first (one block) gives
// marked rows, in row order, the free slots, lowest first; the second copies, on a grid that does not depend on how many there are, so
// that both may be captured, and the block that ends last publishes. Without a mark they only look.
//
// A slot is free while the number of its last snapshot, which only the device writes, is the one that the host has given back, which
// only the host writes: neither ever overwrites what the other says.
#include "block.cuh"

using namespace zos;

constexpr int RECORD_INT4S = 4;
constexpr int COPY_THREADS = 256;
constexpr int THREAD_VECTORS = 4;  // in flight together
constexpr int VECTOR_BYTES = sizeof(int4);
constexpr int PART_BYTES = COPY_THREADS * THREAD_VECTORS * VECTOR_BYTES;  // of a snapshot, copied by a block in one go

// Words of a snapshot slot in mapped memory.
enum SlotWord { NUMBER = 0, GIVEN_BACK = 1, STATE_ID = 2, GENERATION = 3, BOUNDARY = 4, HEAD = 5, CHECK = 6, SLOT_WORDS = 8 };
enum PlanWord { PLAN_SLOT = 0, PLAN_NUMBER = 1, PLAN_STATE_ID = 2, PLAN_GENERATION = 3, PLAN_BOUNDARY = 4, PLAN_HEAD = 5, PLAN_WORDS = 6 };
enum Progress { SNAPSHOTS = 0, SKIPPED = 1, PLANNED = 2, BLOCKS_DONE = 3 };

struct Params {
    const int4* records;          // [capacity, 4]
    const int4* tickets;          // [num_rows]: (state_id, generation, q_start, seqlen_q)
    int* marks;                   // [num_rows]: boundary, or -1; -1 once it is dealt with
    const unsigned char* states;  // [capacity, state_bytes], rows state_stride apart
    unsigned char* snapshots;     // [num_snapshots, state_bytes]
    long long* slots;             // [num_snapshots, SLOT_WORDS], mapped host memory
    long long* taken;             // [num_snapshots]: number of the slot's last snapshot, from 1
    long long* plan;              // [num_snapshots, PLAN_WORDS]
    long long* progress;          // [4]: snapshots so far, marks skipped so far, entries of the plan, blocks done
    long long* skipped_on_host;   // [1]: marks skipped so far, mapped host memory
    long long state_stride;
    long long state_bytes;
    int capacity;
    int num_rows;
    int num_snapshots;
    int overshoot;                // most that a head may be past its boundary
    int vector;                   // every slot begins and ends at a multiple of VECTOR_BYTES
};

// The state of a marked row, or -1 if it is no longer what commit marked.
__device__ __forceinline__ int marked_state(const Params& p, int4 ticket, int mark, int* head) {
    if (mark < 0 || static_cast<unsigned>(ticket.x) >= static_cast<unsigned>(p.capacity)) return -1;
    const int4* record = p.records + static_cast<long long>(ticket.x) * RECORD_INT4S;
    *head = record[2].x;
    return record[1].z == ticket.y && *head - mark <= p.overshoot ? ticket.x : -1;
}

extern "C" __global__ void swa_ring_snapshot_plan(const __grid_constant__ Params p) {
    wait_for_predecessor();
    int marked = 0;
    for (int first = 0; first < p.num_rows; first += blockDim.x) {
        const int row = first + threadIdx.x;
        marked += __syncthreads_count(row < p.num_rows && p.marks[row] >= 0);
    }
    if (marked == 0) {
        if (threadIdx.x == 0) p.progress[PLANNED] = 0;
        return;
    }
    int room = 0;
    for (int first = 0; first < p.num_snapshots && room < marked; first += blockDim.x) {
        const int slot = first + threadIdx.x;
        const bool is_free = slot < p.num_snapshots &&
                             p.taken[slot] == const_cast<volatile long long*>(p.slots)[slot * SLOT_WORDS + GIVEN_BACK];
        int found;
        const int place = room + rank_in_block(is_free, &found);
        if (is_free && place < marked) p.plan[place * PLAN_WORDS + PLAN_SLOT] = slot;
        room += found;
    }
    const long long before = p.progress[SNAPSHOTS];
    int planned = 0;
    for (int first = 0; first < p.num_rows; first += blockDim.x) {
        const int row = first + threadIdx.x;
        const int mark = row < p.num_rows ? p.marks[row] : -1;
        const int4 ticket = mark >= 0 ? p.tickets[row] : int4{-1, 0, 0, 0};
        int head = 0, found;
        const int state_id = marked_state(p, ticket, mark, &head);
        const int place = planned + rank_in_block(state_id >= 0, &found);  // its barriers show the slots found above to all
        if (mark >= 0) p.marks[row] = -1;
        if (state_id >= 0 && place < smaller(room, marked)) {
            long long* entry = p.plan + place * PLAN_WORDS;
            entry[PLAN_NUMBER] = before + 1 + place;
            entry[PLAN_STATE_ID] = state_id;
            entry[PLAN_GENERATION] = ticket.y;
            entry[PLAN_BOUNDARY] = mark;
            entry[PLAN_HEAD] = head;
            p.taken[entry[PLAN_SLOT]] = before + 1 + place;
        }
        planned += found;
    }
    planned = smaller(planned, room);
    if (threadIdx.x != 0) return;
    p.progress[SNAPSHOTS] = before + planned;
    p.progress[PLANNED] = planned;
    if (planned == marked) return;
    p.progress[SKIPPED] += marked - planned;
    *const_cast<volatile long long*>(p.skipped_on_host) = p.progress[SKIPPED];
}

__device__ __forceinline__ void copy_part(const Params& p, const long long* entry, long long begin) {
    const unsigned char* from = p.states + entry[PLAN_STATE_ID] * p.state_stride + begin;
    unsigned char* to = p.snapshots + entry[PLAN_SLOT] * p.state_bytes + begin;
    const int bytes = static_cast<int>(p.state_bytes - begin < PART_BYTES ? p.state_bytes - begin : PART_BYTES);
    if (!p.vector) {
        for (int i = threadIdx.x; i < bytes; i += COPY_THREADS) to[i] = from[i];
        return;
    }
    int4 held[THREAD_VECTORS];
#pragma unroll
    for (int k = 0; k < THREAD_VECTORS; ++k) {
        const int i = k * COPY_THREADS + threadIdx.x;
        if (i * VECTOR_BYTES < bytes) held[k] = reinterpret_cast<const int4*>(from)[i];
    }
#pragma unroll
    for (int k = 0; k < THREAD_VECTORS; ++k) {
        const int i = k * COPY_THREADS + threadIdx.x;
        // Past the cache where it can: no step reads a snapshot.
        if (i * VECTOR_BYTES < bytes) __stcs(reinterpret_cast<int4*>(to) + i, held[k]);
    }
}

extern "C" __global__ void __launch_bounds__(COPY_THREADS) swa_ring_snapshot_copy(const __grid_constant__ Params p) {
    wait_for_predecessor();
    const int planned = static_cast<int>(p.progress[PLANNED]);
    if (planned == 0) return;
    const long long parts = (p.state_bytes + PART_BYTES - 1) / PART_BYTES;
    for (long long part = blockIdx.x; part < planned * parts; part += gridDim.x)
        copy_part(p, p.plan + part / parts * PLAN_WORDS, part % parts * PART_BYTES);
    if (!ends_last(p.progress + BLOCKS_DONE)) return;
    for (int i = threadIdx.x; i < planned; i += blockDim.x) {
        const long long* entry = p.plan + i * PLAN_WORDS;
        long long* slot = p.slots + entry[PLAN_SLOT] * SLOT_WORDS;
        long long sum = entry[PLAN_NUMBER];
#pragma unroll
        for (int word = STATE_ID; word <= HEAD; ++word) {
            slot[word] = entry[word];  // the same words in the plan
            sum = sum * 31 + entry[word];
        }
        slot[CHECK] = sum;
        __threadfence_system();  // the bytes, and what is said of them, before the number that tells the host of them
        const_cast<volatile long long*>(slot)[NUMBER] = entry[PLAN_NUMBER];
    }
}
