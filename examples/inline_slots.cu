// A kernel that derives its keys itself: half a kilobyte a token less to read than with an index row of 128. A warp takes a token and adds
// up what stands in a layer's ring at each key, in place of an attention.
#include "key_slot.cuh"

constexpr int WARP = 32;

__device__ __forceinline__ int sum_of_warp(int value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

extern "C" __global__ void sum_of_keys(
    const int2* offset_len,       // [T]: kv_swa_index_offset_len
    const unsigned char* ring,    // [S * R, entry_bytes]: a layer's entries, of states that lie side by side
    int* sums,                    // [T]: of the first byte of every key
    int num_tokens, int entry_bytes, zos::Divisor slots  // make_divisor(R) on the host
) {
    const int token = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (token >= num_tokens) return;
    const int2 window = offset_len[token];
    int sum = 0;
    for (int k = lane; k < window.y; k += WARP) sum += ring[static_cast<long long>(key_slot(window.x, k, slots)) * entry_bytes];
    sum = sum_of_warp(sum);
    if (lane == 0) sums[token] = sum;
}

// The same with index rows int32 [T, width] and their lengths, to see what they cost.
extern "C" __global__ void sum_of_indexed_keys(const int* kv_swa_index, const int* swa_len, const unsigned char* ring, int* sums,
                                               int num_tokens, int entry_bytes, int width) {
    const int token = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (token >= num_tokens) return;
    int sum = 0;
    for (int k = lane; k < swa_len[token]; k += WARP)
        sum += ring[static_cast<long long>(kv_swa_index[static_cast<long long>(token) * width + k]) * entry_bytes];
    sum = sum_of_warp(sum);
    if (lane == 0) sums[token] = sum;
}
