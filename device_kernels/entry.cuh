// What the ring's store and load share: where an entry lies in a strided cache view, and the number formats on its other side.
//
// A warp takes a token's values in rounds of 256: a lane has 8 neighbours, so four lanes share a block of 32 and its scale, and an
// access of the warp is 256 contiguous bytes of an entry and 512 of 16-bit values.
#pragma once
#include "ring.cuh"

namespace zos {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int SCALE_BLOCK = 32;                   // values that share a scale byte
constexpr int LANE_VALUES = 8;                    // values of a lane in a round
constexpr int ROUND_VALUES = WARP * LANE_VALUES;
constexpr int ROUNDS = 2;                         // rounds whose loads are in flight together: a token of 512 values
constexpr int TOKENS = 2;                         // tokens of a warp, in flight together as well

enum Dtype { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// uint8 [num_layers, num_states, ring, 1, entry bytes], rows of the last dimension contiguous.
struct Cache {
    unsigned char* bytes;
    long long layer_stride;  // bytes from one layer's ring to the next layer's, of the same state
    long long state_stride;  // bytes from one state to the next: the whole state slot
    long long slot_stride;   // bytes from one entry to the next
    long long num_slots;     // num_states * ring
    int values;              // data bytes of an entry; its scale bytes follow
    int vector;              // every entry begins at a multiple of 16: wide accesses are legal
};

__device__ __forceinline__ unsigned char* entry_at(const Cache& c, int layer, long long state, int slot) {
    return c.bytes + layer * c.layer_stride + state * c.state_stride + slot * c.slot_stride;
}

// ---- LANE_VALUES elements of an entry -------------------------------------------------------------------------------------

__device__ __forceinline__ uint2 load_elements(const unsigned char* elements, int vector) {
    if (vector) return *reinterpret_cast<const uint2*>(elements);
    unsigned words[2] = {};
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k) words[k / 4] |= static_cast<unsigned>(elements[k]) << (k % 4 * 8);
    return {words[0], words[1]};
}

__device__ __forceinline__ void store_elements(unsigned char* elements, uint2 packed, int vector) {
    if (vector) {
        *reinterpret_cast<uint2*>(elements) = packed;
        return;
    }
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k)
        elements[k] = static_cast<unsigned char>((k < 4 ? packed.x : packed.y) >> (k % 4 * 8));
}

// Whether one of four e4m3 bytes is a NaN: all seven bits of its magnitude are set.
__device__ __forceinline__ bool holds_nan(unsigned word) { return ((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u; }

// Values of two e4m3 bytes, the first in the low byte; which NaN a NaN becomes is left open.
__device__ __forceinline__ float2 e4m3_values(unsigned pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned halves;
    float2 values;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(values.x), "=f"(values.y) : "r"(halves));
    return values;
#else
    return {e4m3_value(static_cast<int>(pair & 0xFFu)), e4m3_value(static_cast<int>(pair >> 8 & 0xFFu))};
#endif
}

// Two e4m3 bytes of values of magnitude <= 448, the first in the low byte.
__device__ __forceinline__ unsigned e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return static_cast<unsigned>(e4m3_round(low)) | static_cast<unsigned>(e4m3_round(high)) << 8;
#endif
}

// Elements -> fp32 under their block's scale byte. Every NaN is the one that the host writes, so that both paths give the same bytes;
// returns whether there is one.
__device__ __forceinline__ bool dequantise(float (&x)[LANE_VALUES], uint2 packed, int scale) {
    const float factor = e8m0_value(scale);
#pragma unroll
    for (int k = 0; k < LANE_VALUES; k += 2) {
        const float2 pair = e4m3_values((k < 4 ? packed.x : packed.y) >> (k % 4 * 8));
        x[k] = multiply(pair.x, factor), x[k + 1] = multiply(pair.y, factor);
    }
    const bool nan = scale == E8M0_NAN || holds_nan(packed.x) || holds_nan(packed.y);
    if (nan) {
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) x[k] = x[k] == x[k] ? x[k] : float_of(0x7FC00000u);
    }
    return nan;
}

// ---- LANE_VALUES values on the other side -----------------------------------------------------------------------------

// As they lie in memory; fp32 fills both halves.
struct Raw {
    uint4 low, high;
};

template <int DTYPE>
__device__ constexpr int value_bytes() { return DTYPE == FLOAT32 ? 4 : 2; }

// `vector`: the address is a multiple of 16.
template <int DTYPE>
__device__ __forceinline__ Raw load_raw(const unsigned char* values, int vector) {
    Raw raw = {};
    if (vector) {
        raw.low = *reinterpret_cast<const uint4*>(values);
        if (DTYPE == FLOAT32) raw.high = *reinterpret_cast<const uint4*>(values + sizeof(uint4));
        return raw;
    }
    unsigned words[8] = {};
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k) {
        if (DTYPE == FLOAT32)
            words[k] = reinterpret_cast<const unsigned*>(values)[k];
        else
            words[k / 2] |= static_cast<unsigned>(reinterpret_cast<const unsigned short*>(values)[k]) << (k % 2 * 16);
    }
    return {{words[0], words[1], words[2], words[3]}, {words[4], words[5], words[6], words[7]}};
}

template <int DTYPE>
__device__ __forceinline__ void unpack(float (&x)[LANE_VALUES], const Raw& raw) {
    const unsigned words[8] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k) {
        if (DTYPE == FLOAT32)
            x[k] = float_of(words[k]);
        else if (DTYPE == BFLOAT16)
            x[k] = float_of(k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16);
        else
            asm("cvt.f32.f16 %0, %1;" : "=f"(x[k]) : "h"(static_cast<unsigned short>(words[k / 2] >> (k % 2 * 16))));
    }
}

// Two values rounded to a 16-bit format, the first in the low half.
template <int DTYPE>
__device__ __forceinline__ unsigned half_pair(float low, float high) {
    unsigned pair;
    if (DTYPE == BFLOAT16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// `nan`: there is one among them, and its payload must be the host's.
template <int DTYPE>
__device__ __forceinline__ void store_values(const float (&x)[LANE_VALUES], unsigned char* out, int vector, bool nan) {
    unsigned words[8] = {};
#pragma unroll
    for (int k = 0; k < LANE_VALUES; k += 2) {
        if (DTYPE == FLOAT32)
            words[k] = bits_of(x[k]), words[k + 1] = bits_of(x[k + 1]);
        else
            words[k / 2] = half_pair<DTYPE>(x[k], x[k + 1]);
    }
    if (DTYPE != FLOAT32 && nan) {
        constexpr unsigned QUIET = DTYPE == BFLOAT16 ? 0x7FC0u : 0x7E00u;
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k)
            if (x[k] != x[k]) words[k / 2] = k % 2 ? words[k / 2] & 0xFFFFu | QUIET << 16 : words[k / 2] & 0xFFFF0000u | QUIET;
    }
    if (vector) {
        *reinterpret_cast<uint4*>(out) = {words[0], words[1], words[2], words[3]};
        if (DTYPE == FLOAT32) *reinterpret_cast<uint4*>(out + sizeof(uint4)) = {words[4], words[5], words[6], words[7]};
        return;
    }
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k) {
        if (DTYPE == FLOAT32)
            reinterpret_cast<unsigned*>(out)[k] = words[k];
        else
            reinterpret_cast<unsigned short*>(out)[k] = static_cast<unsigned short>(words[k / 2] >> (k % 2 * 16));
    }
}

}  // namespace zos
