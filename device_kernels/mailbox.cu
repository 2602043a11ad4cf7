// publish_results: copies the records that commit has left since the last publication into the mailbox, where the host reads them
// without a CUDA call; one block.
//
// A record is published as head number, fence, payload and checksum, fence, tail number: a reader that finds the tail's number, then
// copies, then finds the head's still the same and the checksum right has a whole record, whatever order its CPU sees writes in. The
// fences reach the host, which takes longer than commit itself, so this runs beside a step's body, between two commits.
#include "results.cuh"

using namespace zos;

constexpr int WARP = 32;
constexpr int MAX_WARPS = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// A record in the mailbox: these words, then the payload.
enum MailWord { HEAD = 0, TAIL = 2, CHECKSUM = 4, PAYLOAD_WORDS = 5, MAIL_HEADER_WORDS = 8 };  // head and tail are int64

struct Params {
    const int* results;        // [num_records, result_words]: record n at n % num_records
    long long* results_state;  // [2]: records committed, records published
    int* mailbox;              // [num_records, MAIL_HEADER_WORDS + result_words], mapped host memory
    long long result_words;
    int num_records;
};

// Sum of a value over the block, wrapping around.
__device__ unsigned sum_in_block(unsigned value) {
    __shared__ unsigned of_warp[MAX_WARPS];
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    const unsigned sum = __reduce_add_sync(ALL_LANES, value);
    __syncthreads();  // the array is free again
    if (lane == 0) of_warp[threadIdx.x / WARP] = sum;
    __syncthreads();
    return __reduce_add_sync(ALL_LANES, lane < warps ? of_warp[lane] : 0);
}

__device__ void publish(const Params& p, long long number) {
    const int* record = p.results + number % p.num_records * p.result_words;
    int* mail = p.mailbox + number % p.num_records * (MAIL_HEADER_WORDS + p.result_words);
    const int words = static_cast<int>(record_words(record[ROWS], record[TOKENS_PER_ROW]));
    if (threadIdx.x == 0) *reinterpret_cast<volatile long long*>(mail + HEAD) = number;
    __threadfence_system();
    __syncthreads();
    unsigned sum = 0;
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
        mail[MAIL_HEADER_WORDS + i] = record[i];
        sum += static_cast<unsigned>(record[i]) * (2u * i + 1u);  // odd factors: words that swap places show
    }
    sum = sum_in_block(sum);
    if (threadIdx.x == 0) {
        mail[CHECKSUM] = static_cast<int>(sum);
        mail[PAYLOAD_WORDS] = words;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) *reinterpret_cast<volatile long long*>(mail + TAIL) = number;
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS* WARP) publish_results(const __grid_constant__ Params p) {
    const long long committed = p.results_state[0], published = p.results_state[1];
    // Of records that came faster than they were published only the last num_records are still there.
    const long long oldest = committed - p.num_records + 1;
    for (long long number = published + 1 > oldest ? published + 1 : oldest; number <= committed; ++number) publish(p, number);
    if (threadIdx.x == 0) p.results_state[1] = committed;
}
