// decide_next_step: the end of each step of a device-driven loop: whether the CUDA graph's WHILE node runs another one; one block.
#include "results.cuh"

using namespace zos;

// The runtime's, known to the driver that loads this; NVRTC has no header for it.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

enum BatchState { TAKEN = 2, APPENDED = 3 };
// Words of `control`, int64, mapped host memory: the host writes the first three, the device the others.
enum Control { STOP = 0, STEPS_READ = 1, MOST_STEPS = 2, RUNS_ENDED = 3, LAST_STEP = 4 };

struct Params {
    unsigned long long handle;
    const int* results;             // [num_results, result_words]: record n at n % num_results
    const long long* results_state; // [2]: records committed, records published
    const long long* batch_state;   // [8]: of the slot's batch
    long long* control;             // [8], mapped host memory
    long long* steps;               // [1]: of this run so far
    long long result_words;
    int num_results;
    int spare;                      // records that must stay free
};

extern "C" __global__ void decide_next_step(const __grid_constant__ Params p) {
    const volatile long long* control = p.control;
    const long long stop = control[STOP], read = control[STEPS_READ], most = control[MOST_STEPS];  // one trip to the host
    const long long step = p.results_state[0], steps = p.steps[0] + 1;
    const int* record = p.results + step % p.num_results * p.result_words;
    const int rows = record[ROWS];
    bool finished = false;
    for (int row = threadIdx.x; row < rows; row += blockDim.x)
        finished |= (record[HEADER_WORDS + FLAGS * rows + row] & (IS_FINISHED | IS_REFILLED)) == IS_FINISHED;
    finished = __syncthreads_or(finished);
    if (threadIdx.x != 0) return;
    const bool starved = finished && p.batch_state[TAKEN] == p.batch_state[APPENDED];
    const bool ends = starved || stop != 0 || steps >= most || step - read + p.spare >= p.num_results;
    cudaGraphSetConditional(p.handle, !ends);
    p.steps[0] = ends ? 0 : steps;
    if (!ends) return;
    volatile long long* told = p.control;
    told[LAST_STEP] = step;
    __threadfence_system();
    told[RUNS_ENDED] += 1;
}
