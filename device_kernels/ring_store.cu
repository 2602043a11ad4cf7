// swa_ring_store: quantises new SWA vectors to MXFP8 entries and writes them into the rings of one layer or of several; a warp has
// two tokens (entry.cuh), a grid row one layer.
#include "entry.cuh"

using namespace zos;

struct Params {
    Cache cache;
    const unsigned char* values;  // [num_layers, num_tokens, cache.values], contiguous
    const long long* write_slot;  // [num_tokens]: state_id * ring + slot, -1 to skip
    unsigned char* cast_back;     // like values, or null: what a reader of the ring will see
    long long num_tokens;
    int vector_values;            // values and cast_back may be accessed 16 bytes at a time
    Divisor ring;
};

// Larger magnitude of a lane and its values; a NaN anywhere gives a NaN, and subnormals stay, which CuPy's -ftz=true would flush.
__device__ __forceinline__ float larger_magnitude(float amax, float x) {
    asm("{.reg .f32 magnitude; abs.f32 magnitude, %1; max.NaN.f32 %0, %0, magnitude;}" : "+f"(amax) : "f"(x));
    return amax;
}

// Quantises a lane's values; the four lanes of a scale block call it together.
__device__ __forceinline__ uint2 quantise(const float (&x)[LANE_VALUES], int* scale) {
    float amax = 0.0f;
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k) amax = larger_magnitude(amax, x[k]);
#pragma unroll
    for (int step = 1; step < SCALE_BLOCK / LANE_VALUES; step *= 2)
        amax = larger_magnitude(amax, __shfl_xor_sync(ALL_LANES, amax, step));
    *scale = e8m0_round_up(bits_of(amax));
    if (*scale == E8M0_NAN) return {0x7F7F7F7Fu, 0x7F7F7F7Fu};
    const float inverse = e8m0_inverse(*scale);
    const auto pair = [&](int k) { return e4m3_pair(multiply(x[k], inverse), multiply(x[k + 1], inverse)); };
    return {pair(0) | pair(2) << 16, pair(4) | pair(6) << 16};
}

template <int DTYPE>
__device__ __forceinline__ void store_tokens(const Params& p) {
    const int lane = threadIdx.x % WARP, layer = blockIdx.y, width = p.cache.values;
    const long long first = (blockIdx.x * static_cast<long long>(blockDim.x / WARP) + threadIdx.x / WARP) * TOKENS;
    long long place[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) place[t] = first + t < p.num_tokens ? p.write_slot[first + t] : -1;

    for (int begin = 0; begin < width; begin += ROUNDS * ROUND_VALUES) {  // all lanes go round together: they exchange below
        Raw raw[TOKENS][ROUNDS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int i = begin + r * ROUND_VALUES + lane * LANE_VALUES;
                raw[t][r] = {};
                if (first + t < p.num_tokens && i < width)
                    raw[t][r] = load_raw<DTYPE>(
                        p.values + ((layer * p.num_tokens + first + t) * width + i) * value_bytes<DTYPE>(), p.vector_values);
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const bool stored = place[t] >= 0 && place[t] < p.cache.num_slots;
            const int state = stored ? quotient(static_cast<int>(place[t]), p.ring) : 0;
            unsigned char* entry = entry_at(p.cache, layer, state, static_cast<int>(place[t]) - state * p.ring.divisor);
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int i = begin + r * ROUND_VALUES + lane * LANE_VALUES;
                float x[LANE_VALUES];
                unpack<DTYPE>(x, raw[t][r]);
                int scale;
                const uint2 packed = quantise(x, &scale);
                if (i >= width) continue;
                if (stored) {
                    store_elements(entry + i, packed, p.cache.vector);
                    if (i % SCALE_BLOCK == 0) entry[width + i / SCALE_BLOCK] = static_cast<unsigned char>(scale);
                }
                if (p.cast_back && first + t < p.num_tokens) {
                    const bool nan = dequantise(x, packed, scale);
                    store_values<DTYPE>(
                        x, p.cast_back + ((layer * p.num_tokens + first + t) * width + i) * value_bytes<DTYPE>(),
                        p.vector_values, nan);
                }
            }
        }
    }
}

extern "C" __global__ void swa_ring_store_float32(const __grid_constant__ Params p) { wait_for_predecessor(); store_tokens<FLOAT32>(p); }
extern "C" __global__ void swa_ring_store_float16(const __grid_constant__ Params p) { wait_for_predecessor(); store_tokens<FLOAT16>(p); }
extern "C" __global__ void swa_ring_store_bfloat16(const __grid_constant__ Params p) { wait_for_predecessor(); store_tokens<BFLOAT16>(p); }
