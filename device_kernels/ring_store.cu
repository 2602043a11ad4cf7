// swa_ring_store: quantises new SWA vectors to MXFP8 entries and writes them into the ring, one warp a token.
//
// A lane takes 16 neighbouring values, so two lanes share a block of 32 and its scale, and a warp stores 512 bytes in one go.
#include "entry.cuh"

using namespace zos;

struct Params {
    Cache cache;
    const void* values;           // [num_tokens, cache.values], contiguous
    const long long* write_slot;  // [num_tokens]: state_id * ring + slot, -1 to skip
    void* cast_back;              // like values, or null: what a reader of the ring will see
    long long num_tokens;
    int dtype;
    int vector_values;            // values and cast_back may be accessed 16 bytes at a time
    Divisor ring;
};

extern "C" __global__ void swa_ring_store(const __grid_constant__ Params p) {
    const long long token = blockIdx.x * static_cast<long long>(blockDim.x / WARP) + threadIdx.x / WARP;
    if (token >= p.num_tokens) return;
    const int lane = threadIdx.x % WARP;
    const long long place = p.write_slot[token];
    const bool stored = place >= 0 && place < p.cache.num_slots;
    const int state = stored ? quotient(static_cast<int>(place), p.ring) : 0;
    unsigned char* entry = entry_at(p.cache, state, static_cast<int>(place) - state * p.ring.divisor);
    if (!stored && !p.cast_back) return;

    for (int first = 0; first < p.cache.values; first += WARP_VALUES) {  // all lanes go round together: they exchange below
        const int i = first + lane * LANE_VALUES;
        const bool mine = i < p.cache.values;
        const long long at = token * p.cache.values + i;
        float x[LANE_VALUES] = {};
        if (mine) load_values(x, p.values, at, p.dtype, p.vector_values);
        unsigned amax = 0;  // as bits: magnitudes order like their bits, a NaN's above all
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) amax = max(amax, bits_of(x[k]) & 0x7FFFFFFFu);
        amax = max(amax, __shfl_xor_sync(ALL_LANES, amax, 1));
        if (!mine) continue;

        const int scale = e8m0_round_up(amax);
        uint4 packed = {0x7F7F7F7Fu, 0x7F7F7F7Fu, 0x7F7F7F7Fu, 0x7F7F7F7Fu};
        if (scale != E8M0_NAN) {
            const float inverse = e8m0_inverse(scale);
            unsigned words[4];
#pragma unroll
            for (int w = 0; w < 4; ++w)
                words[w] = e4m3_pair(multiply(x[4 * w], inverse), multiply(x[4 * w + 1], inverse)) |
                           e4m3_pair(multiply(x[4 * w + 2], inverse), multiply(x[4 * w + 3], inverse)) << 16;
            packed = {words[0], words[1], words[2], words[3]};
        }
        const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
        if (stored) {
            if (p.cache.vector) {
                *reinterpret_cast<uint4*>(entry + i) = packed;
            } else {
#pragma unroll
                for (int k = 0; k < LANE_VALUES; ++k) entry[i + k] = static_cast<unsigned char>(words[k / 4] >> (k % 4 * 8));
            }
            if (lane % 2 == 0) entry[p.cache.values + i / (2 * LANE_VALUES)] = static_cast<unsigned char>(scale);
        }
        if (p.cast_back) {
            const float factor = e8m0_value(scale);
#pragma unroll
            for (int k = 0; k < LANE_VALUES; ++k)
                x[k] = element_value(words[k / 4] >> (k % 4 * 8) & 0xFFu, factor);
            store_values(x, p.cast_back, at, p.dtype, p.vector_values);
        }
    }
}
