// What kernels do with all threads of a block together: counting predicates, and finding out which block of a launch ends last.
#pragma once
#include "ring.cuh"

namespace zos {

constexpr int WARP = 32;
constexpr int MAX_WARPS = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// Number of set predicates before this thread, and in the whole block.
__device__ __forceinline__ int rank_in_block(bool set, int* total) {
    __shared__ int of_warp[MAX_WARPS];
    const unsigned votes = __ballot_sync(ALL_LANES, set);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    __syncthreads();  // the array is free again
    if (lane == 0) of_warp[warp] = __popc(votes);
    __syncthreads();
    int rank = __popc(votes & ((1u << lane) - 1));
    *total = 0;
    for (int w = 0; w < blockDim.x / WARP; ++w) {
        if (w < warp) rank += of_warp[w];
        *total += of_warp[w];
    }
    return rank;
}

// Whether this block is the last to end; what the others wrote is then visible. The launch after finds the count at 0 again.
__device__ __forceinline__ bool ends_last(long long* blocks_done) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (gridDim.x == 1) return true;
    if (threadIdx.x == 0) {
        last = atomicAdd(reinterpret_cast<unsigned long long*>(blocks_done), 1ull) == gridDim.x - 1;
        if (last) *blocks_done = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

}  // namespace zos
