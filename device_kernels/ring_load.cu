// swa_ring_load: gathers history entries by load plan, dequantises them, and writes zeros where there are none; one warp a row.
#include "entry.cuh"

using namespace zos;

struct Params {
    Cache cache;
    const int4* load_plan;  // [num_rows / window, 3]: (src state_id or -1 for zeros, src ring slot, dst row, rows)
    void* out;              // [num_rows, cache.values], contiguous
    long long num_rows;     // B * window
    int ring;
    int dtype;
    int vector_out;         // out may be written 16 bytes at a time
    int window;
};

extern "C" __global__ void swa_ring_load(const __grid_constant__ Params p) {
    const long long row = blockIdx.x * static_cast<long long>(blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= p.num_rows) return;
    const int lane = threadIdx.x % WARP;
    const int4* plan = p.load_plan + row / p.window * 3;
    long long state = -1;
    int slot = 0;
#pragma unroll
    for (int s = 0; s < 3; ++s) {
        const int4 segment = plan[s];
        if (row >= segment.z && row - segment.z < segment.w) {
            state = segment.x;
            slot = segment.y + static_cast<int>(row - segment.z);
        }
    }
    // A plan names slots of this cache; one that does not (a stale or foreign plan) reads zeros, not memory.
    const bool there = state >= 0 && slot >= 0 && slot < p.ring && state * p.ring + slot < p.cache.num_slots;
    const unsigned char* entry = entry_at(p.cache, there ? state : 0, there ? slot : 0);

    for (int i = lane * LANE_VALUES; i < p.cache.values; i += WARP_VALUES) {
        float x[LANE_VALUES] = {};
        if (there) {
            unsigned words[4];
            if (p.cache.vector) {
                const uint4 packed = *reinterpret_cast<const uint4*>(entry + i);
                words[0] = packed.x, words[1] = packed.y, words[2] = packed.z, words[3] = packed.w;
            } else {
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    words[w] = entry[i + 4 * w] | entry[i + 4 * w + 1] << 8 | entry[i + 4 * w + 2] << 16 |
                               static_cast<unsigned>(entry[i + 4 * w + 3]) << 24;
            }
            const float factor = e8m0_value(entry[p.cache.values + i / (2 * LANE_VALUES)]);
#pragma unroll
            for (int k = 0; k < LANE_VALUES; ++k)
                x[k] = element_value(words[k / 4] >> (k % 4 * 8) & 0xFFu, factor);
        }
        store_values(x, p.out, row * p.cache.values + i, p.dtype, p.vector_out);
    }
}
