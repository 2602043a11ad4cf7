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

// Sums of four counts that each warp has, for thread 0 alone.
__device__ __forceinline__ int4 counts_in_block(int4 of_warp) {
    __shared__ int4 of_warps[MAX_WARPS];
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = of_warp;
    __syncthreads();
    int4 sum = {};
    if (threadIdx.x == 0) {
        for (int w = 0; w < blockDim.x / WARP; ++w)
            sum.x += of_warps[w].x, sum.y += of_warps[w].y, sum.z += of_warps[w].z, sum.w += of_warps[w].w;
    }
    return sum;
}

// Whether this block is the last to end; what the others wrote is then visible. The launch after finds the count at 0 again.
__device__ __forceinline__ bool ends_last(long long* blocks_done) {
    __shared__ bool last;
    if (gridDim.x == 1) {  // a barrier is enough for the block's own threads; the fence reaches further, and costs 0.7 µs
        __syncthreads();
        return true;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(reinterpret_cast<unsigned long long*>(blocks_done), 1ull) == gridDim.x - 1;
        if (last) *blocks_done = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

}  // namespace zos
