// What the ring's store and load share: where an entry lies in a strided cache view, and the number formats on its other side.
#pragma once
#include "ring.cuh"

namespace zos {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANE_VALUES = 16;  // values of a lane: 16 bytes of an entry, half a scale block
constexpr int WARP_VALUES = WARP * LANE_VALUES;

enum Dtype { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// uint8 [num_states, ring, 1, entry bytes], rows of the last dimension contiguous.
struct Cache {
    unsigned char* bytes;
    long long state_stride;  // bytes from one state to the next: the whole state slot
    long long slot_stride;   // bytes from one entry to the next
    long long num_slots;     // num_states * ring
    int values;              // data bytes of an entry; its scale bytes follow
    int vector;              // every entry begins at a multiple of 16: 16-byte accesses are legal
};

__device__ __forceinline__ unsigned char* entry_at(const Cache& c, long long state, int slot) {
    return c.bytes + state * c.state_stride + slot * c.slot_stride;
}

__device__ __forceinline__ float load_value(const void* values, long long i, int dtype) {
    if (dtype == FLOAT32) return static_cast<const float*>(values)[i];
    const unsigned short half = static_cast<const unsigned short*>(values)[i];
    if (dtype == BFLOAT16) return float_of(static_cast<unsigned>(half) << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

// Value of an element under its block's factor; every NaN is the one that the host writes, so that both paths give the same bytes.
__device__ __forceinline__ float element_value(unsigned byte, float factor) {
    const float value = multiply(e4m3_value(static_cast<int>(byte)), factor);
    return value == value ? value : float_of(0x7FC00000u);
}

__device__ __forceinline__ unsigned short half_bits(float value, int dtype) {
    if (value != value) return dtype == BFLOAT16 ? 0x7FC0 : 0x7E00;
    unsigned short half;
    if (dtype == BFLOAT16)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

// LANE_VALUES values from `i` on; `vector`: that address is a multiple of 16.
__device__ __forceinline__ void load_values(float (&out)[LANE_VALUES], const void* values, long long i, int dtype, int vector) {
    if (!vector) {
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) out[k] = load_value(values, i + k, dtype);
    } else if (dtype == FLOAT32) {
#pragma unroll
        for (int k = 0; k < LANE_VALUES; k += 4) {
            const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(values) + i + k);
            out[k] = four.x, out[k + 1] = four.y, out[k + 2] = four.z, out[k + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int k = 0; k < LANE_VALUES; k += 8) {
            const uint4 eight = *reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(values) + i + k);
            const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                if (dtype == BFLOAT16) {
                    out[k + 2 * w] = float_of(words[w] << 16);
                    out[k + 2 * w + 1] = float_of(words[w] & 0xFFFF0000u);
                } else {
                    asm("cvt.f32.f16 %0, %1;" : "=f"(out[k + 2 * w]) : "h"(static_cast<unsigned short>(words[w])));
                    asm("cvt.f32.f16 %0, %1;" : "=f"(out[k + 2 * w + 1]) : "h"(static_cast<unsigned short>(words[w] >> 16)));
                }
            }
        }
    }
}

__device__ __forceinline__ void store_values(const float (&in)[LANE_VALUES], void* values, long long i, int dtype, int vector) {
    if (dtype == FLOAT32) {
        float* out = static_cast<float*>(values) + i;
        if (vector) {
#pragma unroll
            for (int k = 0; k < LANE_VALUES; k += 4)
                *reinterpret_cast<float4*>(out + k) = {in[k], in[k + 1], in[k + 2], in[k + 3]};
        } else {
#pragma unroll
            for (int k = 0; k < LANE_VALUES; ++k) out[k] = in[k];
        }
        return;
    }
    unsigned short* out = static_cast<unsigned short*>(values) + i;
    unsigned words[LANE_VALUES / 2];
#pragma unroll
    for (int k = 0; k < LANE_VALUES; k += 2)
        words[k / 2] = half_bits(in[k], dtype) | static_cast<unsigned>(half_bits(in[k + 1], dtype)) << 16;
    if (vector) {
#pragma unroll
        for (int k = 0; k < LANE_VALUES / 2; k += 4)
            *reinterpret_cast<uint4*>(out + 2 * k) = {words[k], words[k + 1], words[k + 2], words[k + 3]};
    } else {
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) out[k] = static_cast<unsigned short>(words[k / 2] >> (k % 2 * 16));
    }
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

}  // namespace zos
