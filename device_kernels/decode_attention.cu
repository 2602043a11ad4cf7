// swa_decode_attention: attention of new tokens over their sequence's ring, read as its entries lie there; keys are values (MQA).
//
// A block takes `group` neighbouring tokens, as a decode row has them: they share nearly all keys, so the ring is dequantised once,
// into bf16 in shared memory, in slot order (attention does not ask in which order keys come), and each token masks the slots that
// its index does not name. A warp then works alone on two tiles of 16 heads: scores, softmax and probabilities stay in registers, as
// all keys are there at once.
//
// Shared memory holds the 32 values of a group of a key permuted (`column_of`), so that what a lane needs of queries, and what it
// has of outputs, are 8 neighbouring values: 16 bytes.
#include "entry.cuh"

using namespace zos;

constexpr int WIDTH = 512;             // values of an entry
constexpr int KEYS = 144;              // most slots of a ring
constexpr int KEY_STRIDE = WIDTH + 8;  // bf16 from one key to the next: 16 bytes more, so that 8 keys lie in 8 bank groups
constexpr int WARPS = 12;
constexpr int TILE = 16;               // heads of a tile
constexpr int PAIR = 2;                // tiles of a warp
constexpr int KEY_TILES = KEYS / TILE;
constexpr int MASK_WORDS = (KEYS + WARP - 1) / WARP;
constexpr int MAX_GROUP = 32;          // tokens of a block
constexpr int SCALES = WIDTH / SCALE_BLOCK;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr unsigned NEGATIVE_INFINITY = 0xFF800000u, QUIET_NAN = 0x7FC00000u;  // bits

enum { NO_KEYS = -1, FOREIGN = -2 };   // instead of a state: a token without keys; one whose index is not of one ring

struct Params {
    Cache cache;
    const uint4* q;          // bf16 [num_tokens, num_heads, WIDTH]
    const int* index;        // [num_tokens, columns]: state * ring + slot, -1: skip
    const int* lengths;      // [num_tokens]: columns from here on are not read
    const float* sink;       // [num_heads] or null: a score that takes its share and has no value
    uint4* out;              // bf16 [num_tokens, num_heads, WIDTH]
    float* lse;              // [num_tokens, num_heads]: log of the sum of exp(score), the sink not counted
    float scale;
    int num_tokens, num_heads, columns, ring, group;
};

struct Shared {
    unsigned visible[MAX_GROUP][MASK_WORDS];  // of each token: a bit a slot
    int states[MAX_GROUP];
};

// ---- tensor core instructions ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(unsigned (&b)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address));
}

__device__ __forceinline__ void load_transposed(unsigned (&b)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address));
}

// c [16, 8] += a [16, 16] * b [16, 8]
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- a group's keys -------------------------------------------------------------------------------------------------------

// Which slots of which ring a token sees; a warp.
__device__ __forceinline__ void read_index(const Params& p, int token, unsigned (&visible)[MASK_WORDS], int* state) {
    const int lane = threadIdx.x % WARP;
    const int* index = p.index + static_cast<long long>(token) * p.columns;
    const int length = smaller(p.lengths[token], p.columns);
    int its_state = NO_KEYS;
    bool foreign = false;
    unsigned words[MASK_WORDS] = {};
    for (int first = 0; first < length; first += WARP) {
        const int k = first + lane;
        const int key = k < length ? index[k] : -1;
        const int state_id = key < 0 ? NO_KEYS : key >= p.cache.num_slots ? FOREIGN : key / p.ring;
        const int named = __reduce_max_sync(ALL_LANES, state_id);
        if (its_state < 0) its_state = named;
        foreign |= state_id != NO_KEYS && state_id != its_state;
        const int slot = key - state_id * p.ring;
#pragma unroll
        for (int w = 0; w < MASK_WORDS; ++w)
            words[w] |= __reduce_or_sync(ALL_LANES, state_id >= 0 && slot / WARP == w ? 1u << slot % WARP : 0u);
    }
    foreign = __any_sync(ALL_LANES, foreign);
    if (lane == 0) {
        *state = foreign ? FOREIGN : its_state;
#pragma unroll
        for (int w = 0; w < MASK_WORDS; ++w) visible[w] = words[w];
    }
}

// Where value `dim` of a key stands in shared memory: lane c of four has the values 8c … 8c + 7 of each 32, as pairs j = 0 … 3.
__device__ __forceinline__ constexpr int column_of(int group, int j, int c) { return group * SCALE_BLOCK + 8 * j + 2 * c; }

// Dequantises the slots that `wanted` names, zeros elsewhere; the whole block. Four lanes a key, eight keys a warp.
__device__ __forceinline__ void load_keys(const Params& p, unsigned short* keys, int state, const unsigned (&wanted)[MASK_WORDS]) {
    constexpr int IN_FLIGHT = 8;
    const int lane = threadIdx.x % WARP, c = lane % 4;
    for (int slot = threadIdx.x / 4; slot < KEYS; slot += WARPS * WARP / 4) {
        unsigned word = 0;
#pragma unroll
        for (int w = 0; w < MASK_WORDS; ++w) word = slot / WARP == w ? wanted[w] : word;
        const bool there = slot < p.ring && word >> slot % WARP & 1u;
        const unsigned char* entry = entry_at(p.cache, 0, state, slot);
        unsigned short* key = keys + slot * KEY_STRIDE;
#pragma unroll
        for (int begin = 0; begin < SCALES; begin += IN_FLIGHT) {
            uint2 packed[IN_FLIGHT];
            int scale[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                packed[i] = {};
                scale[i] = 0;
                if (!there) continue;
                packed[i] = load_elements(entry + (begin + i) * SCALE_BLOCK + c * LANE_VALUES, p.cache.vector);
                scale[i] = entry[WIDTH + begin + i];
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                float x[LANE_VALUES];
                dequantise(x, packed[i], scale[i]);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    *reinterpret_cast<unsigned*>(key + column_of(begin + i, j, c)) = half_pair<BFLOAT16>(x[2 * j], x[2 * j + 1]);
            }
        }
    }
}

// ---- a warp's tiles -------------------------------------------------------------------------------------------------------

// Softmax numerators of a tile over all slots, as the left operand of the next product, and what to divide by, of the tile's rows
// lane / 4 and lane / 4 + 8. A row is a token's head: token * num_heads + head.
__device__ __forceinline__ void score_tile(
    const Params& p, unsigned keys, int first_row, const unsigned* visible, unsigned (&weights)[KEY_TILES][4], float (&inverse)[2]
) {
    const int lane = threadIdx.x % WARP, c = lane % 4;
    const uint4* q = p.q + static_cast<long long>(first_row + lane / 4) * (WIDTH / LANE_VALUES) + c;
    constexpr int ROW_8 = 8 * (WIDTH / LANE_VALUES);
    // rows of the matrices: keys 0 … 7 and 8 … 15, columns 0 … 7 and 8 … 15 of each
    const unsigned matrix = keys + ((lane / 16 * 8 + lane % 8) * KEY_STRIDE + lane / 8 % 2 * 8) * sizeof(short);

    float scores[2 * KEY_TILES][4] = {};
    uint4 low = q[0], high = q[ROW_8];
#pragma unroll 1
    for (int group = 0; group < SCALES; ++group) {
        const unsigned a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
        if (group + 1 < SCALES) {
            low = q[(group + 1) * 4];
            high = q[(group + 1) * 4 + ROW_8];
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int tile_of_keys = 0; tile_of_keys < KEY_TILES; ++tile_of_keys) {
                unsigned b[4];
                load_matrices(b, matrix + (tile_of_keys * TILE * KEY_STRIDE + group * SCALE_BLOCK + step * TILE) * sizeof(short));
                multiply_add(scores[2 * tile_of_keys], a[step], b[0], b[1]);
                multiply_add(scores[2 * tile_of_keys + 1], a[step], b[2], b[3]);
            }
        }
    }

    unsigned mask[MASK_WORDS];
#pragma unroll
    for (int w = 0; w < MASK_WORDS; ++w) mask[w] = visible[w] >> 2 * c;
    const auto sees = [&](int eight, int e) { return mask[eight / 4] >> (eight % 4 * 8 + e % 2) & 1u; };
    const float scale = p.scale * LOG2_E;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = float_of(NEGATIVE_INFINITY), sum = 0;
#pragma unroll
        for (int eight = 0; eight < 2 * KEY_TILES; ++eight) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e)
                if (sees(eight, e)) largest = fmaxf(largest, scores[eight][e]);
        }
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2)) * scale;
#pragma unroll
        for (int eight = 0; eight < 2 * KEY_TILES; ++eight) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                scores[eight][e] = sees(eight, e) ? exp2f(fmaf(scores[eight][e], scale, -largest)) : 0.0f;
                sum += scores[eight][e];
            }
            weights[eight / 2][eight % 2 * 2 + half] = half_pair<BFLOAT16>(scores[eight][2 * half], scores[eight][2 * half + 1]);
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        const int row = first_row + lane / 4 + 8 * half;
        if (c == 0) p.lse[row] = (largest + log2f(sum)) * LN_2;
        if (p.sink) sum += exp2f(p.sink[row % p.num_heads] * LOG2_E - largest);
        inverse[half] = 1.0f / sum;
    }
}

__device__ __forceinline__ void attend(const Params& p, unsigned keys, const Shared& shared, int first_token, int run, int end, int pair) {
    const int lane = threadIdx.x % WARP, head_tiles = p.num_heads / TILE;
    int rows[PAIR];  // the first of each tile
    unsigned weights[PAIR][KEY_TILES][4];
    float inverse[PAIR][2];
#pragma unroll
    for (int i = 0; i < PAIR; ++i) {
        // Where tiles are odd in number, the last pair does the last one twice.
        const int tile = smaller(PAIR * pair + i, (end - run) * head_tiles - 1), token = run + tile / head_tiles;
        rows[i] = (first_token + token) * p.num_heads + tile % head_tiles * TILE;
        score_tile(p, keys, rows[i], shared.visible[token], weights[i], inverse[i]);
    }
    const unsigned matrix = keys + (lane % 16 * KEY_STRIDE + lane / 16 * 8) * sizeof(short);
#pragma unroll 1
    for (int group = 0; group < SCALES; ++group) {
        float sums[PAIR][4][4] = {};
#pragma unroll
        for (int tile_of_keys = 0; tile_of_keys < KEY_TILES; ++tile_of_keys) {
            unsigned b[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                load_transposed(b[half], matrix + (tile_of_keys * TILE * KEY_STRIDE + group * SCALE_BLOCK + half * TILE) * sizeof(short));
#pragma unroll
            for (int i = 0; i < PAIR; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    multiply_add(sums[i][j], weights[i][tile_of_keys], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < PAIR; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float by = inverse[i][half];
                unsigned words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    words[j] = half_pair<BFLOAT16>(sums[i][j][2 * half] * by, sums[i][j][2 * half + 1] * by);
                const long long row = rows[i] + lane / 4 + 8 * half;
                p.out[row * (WIDTH / LANE_VALUES) + group * 4 + lane % 4] = {words[0], words[1], words[2], words[3]};
            }
        }
    }
}

// Tokens without keys: zeros; tokens whose index is nonsense: NaN, which nobody takes for a result.
__device__ __forceinline__ void fill(const Params& p, int token, bool foreign) {
    const unsigned word = foreign ? 0x7FC07FC0u : 0;
    const long long first = static_cast<long long>(token) * p.num_heads;
    for (int i = threadIdx.x; i < p.num_heads * (WIDTH / LANE_VALUES); i += blockDim.x)
        p.out[first * (WIDTH / LANE_VALUES) + i] = {word, word, word, word};
    for (int i = threadIdx.x; i < p.num_heads; i += blockDim.x) p.lse[first + i] = float_of(foreign ? QUIET_NAN : NEGATIVE_INFINITY);
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1) swa_decode_attention(const __grid_constant__ Params p) {
    extern __shared__ uint4 dynamic[];
    __shared__ Shared shared;
    auto* keys = reinterpret_cast<unsigned short*>(dynamic);  // bf16 [KEYS, KEY_STRIDE]
    const unsigned keys_address = static_cast<unsigned>(__cvta_generic_to_shared(keys));
    const int warp = threadIdx.x / WARP, first = blockIdx.x * p.group, count = smaller(p.group, p.num_tokens - first);
    for (int token = warp; token < count; token += WARPS)
        read_index(p, first + token, shared.visible[token], &shared.states[token]);
    __syncthreads();

    for (int run = 0, end; run < count; run = end) {  // neighbouring tokens of one state
        const int state = shared.states[run];
        unsigned wanted[MASK_WORDS] = {};
        for (end = run; end < count && shared.states[end] == state; ++end) {
#pragma unroll
            for (int w = 0; w < MASK_WORDS; ++w) wanted[w] |= shared.visible[end][w];
        }
        if (state < 0) {
            for (int token = run; token < end && blockIdx.y == 0; ++token) fill(p, first + token, state == FOREIGN);
            continue;
        }
        __syncthreads();  // nobody reads the keys of the run before any more
        load_keys(p, keys, state, wanted);
        __syncthreads();
        const int pairs = ((end - run) * (p.num_heads / TILE) + PAIR - 1) / PAIR;
        for (int pair = blockIdx.y * WARPS + warp; pair < pairs; pair += gridDim.y * WARPS)
            attend(p, keys_address, shared, first, run, end, pair);
    }
}
