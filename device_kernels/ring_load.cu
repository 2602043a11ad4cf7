// swa_ring_load: gathers history entries by load plan out of the rings of one layer or of several, dequantises them, and writes
// zeros where there are none; a warp has two rows (entry.cuh), a grid row one layer.
#include "entry.cuh"

using namespace zos;

struct Params {
    Cache cache;
    const int4* load_plan;    // [num_rows / window, 3]: (src state_id or -1 for zeros, src ring slot, dst row, rows)
    unsigned char* out;       // [num_layers, out_rows, cache.values], contiguous
    long long out_rows;       // num_rows or more
    int num_rows;             // B * window
    int ring;
    int vector_out;           // out may be written 16 bytes at a time
    Divisor window;
};

// The entry that a history row is loaded from, null for a row of zeros.
__device__ __forceinline__ const unsigned char* source_of_row(const Params& p, int layer, int row) {
    const int4* plan = p.load_plan + quotient(row, p.window) * 3ll;
    long long state = -1;
    int slot = 0;
#pragma unroll
    for (int s = 0; s < 3; ++s) {
        const int4 segment = plan[s];
        const int k = row - segment.z;  // may wrap around in a nonsense plan, and is out of range then
        if (row >= segment.z && k >= 0 && k < segment.w) {
            state = segment.x;
            slot = segment.y > INT32_LARGEST - k ? -1 : segment.y + k;
        }
    }
    // A plan names slots of this cache; one that does not (a stale or foreign plan) reads zeros, not memory.
    const bool there = state >= 0 && slot >= 0 && slot < p.ring && state * p.ring + slot < p.cache.num_slots;
    return there ? entry_at(p.cache, layer, state, slot) : nullptr;
}

template <int DTYPE>
__device__ __forceinline__ void load_rows(const Params& p) {
    const int lane = threadIdx.x % WARP, layer = blockIdx.y, width = p.cache.values;
    const long long first = (blockIdx.x * static_cast<long long>(blockDim.x / WARP) + threadIdx.x / WARP) * TOKENS;
    const unsigned char* source[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
        source[t] = first + t < p.num_rows ? source_of_row(p, layer, static_cast<int>(first + t)) : nullptr;

    for (int begin = 0; begin < width; begin += ROUNDS * ROUND_VALUES) {
        uint2 packed[TOKENS][ROUNDS];
        int scale[TOKENS][ROUNDS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int i = begin + r * ROUND_VALUES + lane * LANE_VALUES;
                packed[t][r] = {};
                scale[t][r] = 0;  // elements of 0 are +0 under it
                if (source[t] && i < width) {
                    packed[t][r] = load_elements(source[t] + i, p.cache.vector);
                    scale[t][r] = source[t][width + i / SCALE_BLOCK];
                }
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            if (first + t >= p.num_rows) break;
            unsigned char* out = p.out + (layer * p.out_rows + first + t) * width * value_bytes<DTYPE>();
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int i = begin + r * ROUND_VALUES + lane * LANE_VALUES;
                if (i >= width) continue;
                float x[LANE_VALUES];
                const bool nan = dequantise(x, packed[t][r], scale[t][r]);
                store_values<DTYPE>(x, out + i * value_bytes<DTYPE>(), p.vector_out, nan);
            }
        }
    }
}

extern "C" __global__ void swa_ring_load_float32(const __grid_constant__ Params p) { wait_for_predecessor(); load_rows<FLOAT32>(p); }
extern "C" __global__ void swa_ring_load_float16(const __grid_constant__ Params p) { wait_for_predecessor(); load_rows<FLOAT16>(p); }
extern "C" __global__ void swa_ring_load_bfloat16(const __grid_constant__ Params p) { wait_for_predecessor(); load_rows<BFLOAT16>(p); }
