// The floors that prepare_v4_decode_metadata is measured against: no work, but the loads and
// the output bytes of it, on the fastest grid.
#include "metadata.cuh"

using namespace zos;

constexpr int PREFILL_INDEX_PARTS = 8;  // as INDEX_PARTS in prefill_metadata.cu

extern "C" __global__ void floor_empty(const __grid_constant__ Params p) {}

// Every output of a token place but its index row, made of `v`.
__device__ __forceinline__ void write_scalars_of(const Params& p, int place, int v) {
    p.kv_swa_index_offset_len[place] = {v, v};
    p.kv_swa_full_index_pivots[place] = {v, v, v, v};
    p.swa_len[place] = v;
    p.positions[place] = v;
    if (p.input_ids) p.input_ids[place] = v;
    p.swa_write_slot[place] = v;
    p.token_row[place] = v;
    p.token_state_id[place] = v;
    for (int c = 0; c < p.num_compressions; ++c) {
        p.compression_write_slot[c * p.compression_stride + place] = v;
        p.compression_index[c * p.compression_stride + place] = v;
    }
}

// Writes every output of every token of this warp's row, made of `v`; the last block has nothing to do (block 0 of a prepare).
__device__ __forceinline__ void write_outputs(const Params& p, int row, int v) {
    const int lane = threadIdx.x % WARP, part = threadIdx.x / WARP, parts = blockDim.x / WARP;
    if (part == 0) {
        for (int j = lane; j < p.tokens_per_step; j += WARP) {
            const int place = row * p.tokens_per_step + j;
            write_scalars_of(p, place, v);
        }
        if (lane == 0) {
            p.seqlens_q[row] = v;
            p.seqlens_k[row] = v;
            p.cu_seqlens_q[row] = v;
            p.tickets[row] = {v, v, v, v};
        }
        if (parts > 1) return;
    }
    const int first = parts > 1 ? part - 1 : 0, step = parts > 1 ? parts - 1 : 1;
    for (int j = first; j < p.tokens_per_step; j += step) {
        int* out = p.kv_swa_index + static_cast<long long>(row * p.tokens_per_step + j) * p.window;
        for (int k = lane * 4; k < p.window; k += WARP * 4) *reinterpret_cast<int4*>(out + k) = {v, v + 1, v + 2, v + 3};
    }
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS* WARP) floor_write_only(const __grid_constant__ Params p) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row < p.num_rows) write_outputs(p, row, row);
}

// Two dependent loads, the row's state id and that state's record, then the writes.
extern "C" __global__ void __launch_bounds__(MAX_WARPS* WARP) floor_dependent_loads(const __grid_constant__ Params p) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= p.num_rows) return;
    const int state_id = state_of_row(p, row);
    write_outputs(p, row, state_id < 0 ? -1 : record_part(p, state_id, 0).z);
}

// What a prefill writes, by token place and by row, and nothing else.
extern "C" __global__ void floor_prefill_write_only(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % WARP, parts = p.kv_swa_full_index ? PREFILL_INDEX_PARTS : 1;
    const int row_warps = larger((p.num_rows + WARP - 1) / WARP, 1);
    const int warp = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP - row_warps;
    if (warp < 0) {
        const int row = (warp + row_warps) * WARP + lane;
        if (row >= p.num_rows) return;
        p.seqlens_q[row] = row;
        p.seqlens_k[row] = row;
        p.cu_seqlens_q[row] = row;
        p.tickets[row] = {row, row, row, row};
        for (int i = 0; i < 3; ++i) p.swa_load_plan[row * 3ll + i] = {row, row, row, row};
        p.last_token_index[row] = row;
        return;
    }
    const int first = warp / parts * WARP, place = first + lane;
    if (warp % parts == 0 && place < p.num_places) write_scalars_of(p, place, place);
    if (!p.kv_swa_full_index) return;
    for (int i = first + warp % parts; i < smaller(first + WARP, p.num_places); i += parts) {
        int* out = p.kv_swa_full_index + static_cast<long long>(i) * p.window;
        for (int k = lane * 4; k < p.window; k += WARP * 4) *reinterpret_cast<int4*>(out + k) = {i, i + 1, i + 2, i + 3};
    }
}
