// swa_decode_attention: attention of new tokens over their sequence's ring, read as its entries lie there; keys are values (MQA).
//
// Neighbouring tokens of one state, as a decode row has them, share nearly all keys: a block takes the runs of such tokens that begin
// among `group` tokens, and dequantises a run's ring once, into bf16 in shared memory, in slot order (attention does not ask in which
// order keys come); each token masks the slots that its index does not name. A warp then works alone on two tiles of 16 heads: scores, softmax and probabilities stay in registers, as
// all keys are there at once.
//
// Shared memory holds the 32 values of a group of a key permuted (`column_of`), so that what a lane needs of queries, and what it
// has of outputs, are 8 neighbouring values: 16 bytes.
#include "entry.cuh"

using namespace zos;

constexpr int WIDTH = 512;             // values of an entry
constexpr int KEYS = 144;              // most slots of a ring
constexpr int KEY_STRIDE = WIDTH + 8;  // bf16 from one key to the next: 16 bytes more, so that 8 keys lie in 8 bank groups
constexpr int ROW_BYTES = KEY_STRIDE * sizeof(short);
constexpr int ENTRY_BEGIN = ROW_BYTES - WIDTH - WIDTH / SCALE_BLOCK;  // in a key's row: where its entry comes to lie, before it is spread
constexpr int WARPS = 12;
constexpr int TILE = 16;               // heads of a tile
constexpr int PAIR = 2;                // tiles of a warp
constexpr int MATRICES = 3;            // loads of key matrices under way and in use; divides 2 * KEY_TILES
constexpr int STAGES = 6;              // groups of 32 values whose queries are under way to a warp's stages
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

// Of the tokens of the group before the block's, of its own and of the one after.
struct Shared {
    unsigned visible[3 * MAX_GROUP][MASK_WORDS];  // a bit a slot
    int states[3 * MAX_GROUP];
    unsigned wanted[MASK_WORDS];  // slots that a token of the run sees
};

// ---- instructions ---------------------------------------------------------------------------------------------------------

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

// One instruction; a result below 2^-126 is 0.
__device__ __forceinline__ float power_of_two(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// ---- queries on their way -------------------------------------------------------------------------------------------------

// A lane copies what it will read itself, so no other lane is waited for.
__device__ __forceinline__ void copy_async(unsigned to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
__device__ __forceinline__ uint4 read_shared(unsigned address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory"); }

// ---- a group's keys -------------------------------------------------------------------------------------------------------

// Which slots of which ring a token sees; a warp.
__device__ __forceinline__ void read_index(const Params& p, int token, unsigned (&visible)[MASK_WORDS], int* state) {
    const int lane = threadIdx.x % WARP;
    const int* index = p.index + static_cast<long long>(token) * p.columns;
    const int length = smaller(p.lengths[token], p.columns);
    int its_state = NO_KEYS;
    bool foreign = false;
    unsigned words[MASK_WORDS] = {};
#pragma unroll 4
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

__device__ __forceinline__ bool is_wanted(const Shared& shared, int slot) { return shared.wanted[slot / WARP] >> slot % WARP & 1u; }

// Brings the entries of the wanted slots to the ends of their keys' rows in shared memory; the whole block, a warp an entry.
__device__ __forceinline__ void fetch_entries(const Params& p, unsigned char* keys, const Shared& shared, int state) {
    constexpr int CHUNK = sizeof(uint4), CHUNKS = (WIDTH + SCALES) / CHUNK;
    const unsigned char* ring = entry_at(p.cache, 0, state, 0);
    for (int slot = threadIdx.x / WARP; slot < p.ring; slot += WARPS) {
        if (!is_wanted(shared, slot)) continue;
        for (int chunk = threadIdx.x % WARP; chunk < CHUNKS; chunk += WARP) {
            const unsigned char* from = ring + slot * p.cache.slot_stride + chunk * CHUNK;
            unsigned char* to = keys + slot * ROW_BYTES + ENTRY_BEGIN + chunk * CHUNK;
            if (p.cache.vector) {
                copy_async(static_cast<unsigned>(__cvta_generic_to_shared(to)), reinterpret_cast<const uint4*>(from));
            } else {
                for (int k = 0; k < CHUNK; ++k) to[k] = from[k];
            }
        }
    }
    end_copies();
}

// Dequantises the entries where they lie, zeros for slots that nobody sees; the whole block, four lanes a key. A group's 64 bytes
// overwrite entries' bytes of groups that have been read: 16 bytes of scales stay behind the last.
__device__ __forceinline__ void spread_entries(const Params& p, unsigned char* keys, const Shared& shared) {
    const int c = threadIdx.x % 4;
    for (int slot = threadIdx.x / 4; slot < KEYS; slot += WARPS * WARP / 4) {  // whole warps: KEYS is a multiple of 8
        const bool there = slot < p.ring && is_wanted(shared, slot);
        unsigned char* row = keys + slot * ROW_BYTES;
        const unsigned char* entry = row + ENTRY_BEGIN;
#pragma unroll 4
        for (int group = 0; group < SCALES; ++group) {
            uint2 packed = {};
            int scale = 0;
            if (there) {
                packed = *reinterpret_cast<const uint2*>(entry + group * SCALE_BLOCK + c * LANE_VALUES);
                scale = entry[WIDTH + group];
            }
            float x[LANE_VALUES];
            dequantise(x, packed, scale);
            __syncwarp();  // the key's other lanes have read
#pragma unroll
            for (int j = 0; j < 4; ++j)
                reinterpret_cast<unsigned*>(row)[column_of(group, j, c) / 2] = half_pair<BFLOAT16>(x[2 * j], x[2 * j + 1]);
        }
    }
}

// ---- a warp's tiles -------------------------------------------------------------------------------------------------------

// Two tiles of 16 rows; a row is a token's head: token * num_heads + head. Stage n of a warp's queries is group n % SCALES of tile
// n / SCALES, 1 KB.
struct Pair {
    int first, second;  // the first row of each tile
    unsigned stages;    // where this lane's queries of the first stage come to lie
};

constexpr unsigned STAGE_BYTES = 2 * WARP * sizeof(uint4);

__device__ __forceinline__ void start_queries(const Params& p, const Pair& pair, int stage) {
    if (stage < PAIR * SCALES) {
        const int lane = threadIdx.x % WARP, row = (stage < SCALES ? pair.first : pair.second) + lane / 4;
        const uint4* q = p.q + static_cast<long long>(row) * (WIDTH / LANE_VALUES) + stage % SCALES * 4 + lane % 4;
        const unsigned to = pair.stages + stage % STAGES * STAGE_BYTES;
        copy_async(to, q);
        copy_async(to + WARP * sizeof(uint4), q + 8 * (WIDTH / LANE_VALUES));
    }
    end_copies();  // also of nothing: the number of groups under way is counted on
}

__device__ __forceinline__ void start_pair(const Params& p, Pair& pair, int end_row) {
    pair.second = smaller(pair.first + TILE, end_row - TILE);  // a last one alone is done twice
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) start_queries(p, pair, stage);
}

// Softmax numerators of a tile over all slots, as the left operand of the next product, and what to divide by, of the tile's rows
// lane / 4 and lane / 4 + 8.
__device__ __forceinline__ void score_tile(
    const Params& p, unsigned keys, Pair& pair, int i, int first_row, const unsigned* visible, unsigned (&weights)[KEY_TILES][4], float (&inverse)[2]
) {
    const int lane = threadIdx.x % WARP, c = lane % 4;
    // rows of the matrices: keys 0 … 7 and 8 … 15, columns 0 … 7 and 8 … 15 of each
    const unsigned matrix = keys + ((lane / 16 * 8 + lane % 8) * KEY_STRIDE + lane / 8 % 2 * 8) * sizeof(short);
    // An instruction's matrices are under way while the products of those before it run.
    constexpr int LOADS = 2 * KEY_TILES;  // of a group: two steps of 16 values
    const auto address = [&](int group, int load) {
        return matrix + (load % KEY_TILES * TILE * KEY_STRIDE + group * SCALE_BLOCK + load / KEY_TILES * TILE) * sizeof(short);
    };
    float scores[2 * KEY_TILES][4] = {};
    unsigned b[MATRICES][4];
#pragma unroll
    for (int load = 0; load < MATRICES - 1; ++load) load_matrices(b[load], address(0, load));
#pragma unroll 1
    for (int group = 0; group < SCALES; ++group) {
        wait_for_copies<STAGES - 2>();
        const int stage = i * SCALES + group;
        const unsigned queries = pair.stages + stage % STAGES * STAGE_BYTES;
        const uint4 low = read_shared(queries), high = read_shared(queries + WARP * sizeof(uint4));
        const unsigned a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
        start_queries(p, pair, stage + STAGES - 1);  // in place of the stage before, which has been used
        const int next = smaller(group + 1, SCALES - 1);
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            const int later = load + MATRICES - 1;
            load_matrices(b[later % MATRICES], later < LOADS ? address(group, later) : address(next, later - LOADS));
            const int tile = load % KEY_TILES, step = load / KEY_TILES, now = load % MATRICES;
            multiply_add(scores[2 * tile], a[step], b[now][0], b[now][1]);
            multiply_add(scores[2 * tile + 1], a[step], b[now][2], b[now][3]);
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
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                if (!sees(eight, e)) scores[eight][e] = float_of(NEGATIVE_INFINITY);
                largest = fmaxf(largest, scores[eight][e]);
            }
        }
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2)) * scale;
#pragma unroll
        for (int eight = 0; eight < 2 * KEY_TILES; ++eight) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                scores[eight][e] = power_of_two(fmaf(scores[eight][e], scale, -largest));
                sum += scores[eight][e];
            }
            weights[eight / 2][eight % 2 * 2 + half] = half_pair<BFLOAT16>(scores[eight][2 * half], scores[eight][2 * half + 1]);
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        const int row = first_row + lane / 4 + 8 * half;
        if (c == 0) p.lse[row] = (largest + log2f(sum)) * LN_2;
        if (p.sink) sum += power_of_two(p.sink[row % p.num_heads] * LOG2_E - largest);
        inverse[half] = 1.0f / sum;
    }
}

__device__ __forceinline__ void attend(const Params& p, unsigned keys, const Shared& shared, Pair& pair, int first_token) {
    const int lane = threadIdx.x % WARP;
    unsigned weights[PAIR][KEY_TILES][4];
    float inverse[PAIR][2];
#pragma unroll
    for (int i = 0; i < PAIR; ++i) {
        const int row = i == 0 ? pair.first : pair.second;
        score_tile(p, keys, pair, i, row, shared.visible[row / p.num_heads - first_token], weights[i], inverse[i]);
    }
    const unsigned matrix = keys + (lane % 16 * KEY_STRIDE + lane / 16 * 8) * sizeof(short);
    constexpr int LOADS = 2 * KEY_TILES;  // of a group: two times 16 values of every tile of keys
    const auto address = [&](int group, int load) {
        return matrix + (load / 2 * TILE * KEY_STRIDE + group * SCALE_BLOCK + load % 2 * TILE) * sizeof(short);
    };
    unsigned b[MATRICES][4];
#pragma unroll
    for (int load = 0; load < MATRICES - 1; ++load) load_transposed(b[load], address(0, load));
#pragma unroll 1
    for (int group = 0; group < SCALES; ++group) {
        float sums[PAIR][4][4] = {};
        const int next = smaller(group + 1, SCALES - 1);
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            const int later = load + MATRICES - 1, now = load % MATRICES;
            load_transposed(b[later % MATRICES], later < LOADS ? address(group, later) : address(next, later - LOADS));
#pragma unroll
            for (int i = 0; i < PAIR; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    multiply_add(sums[i][load % 2 * 2 + j], weights[i][load / 2], b[now][2 * j], b[now][2 * j + 1]);
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
                const long long row = (i == 0 ? pair.first : pair.second) + lane / 4 + 8 * half;
                p.out[row * (WIDTH / LANE_VALUES) + group * 4 + lane % 4] = {words[0], words[1], words[2], words[3]};
            }
        }
    }
}

// Whether a run begins at the block's i-th known token. A longer run of one state is cut where whole groups of it lie behind.
__device__ __forceinline__ bool begins_run(const Shared& shared, int i, int group) {
    const int state = shared.states[i];
    if (state < 0 || state != shared.states[i - 1]) return true;
    if (i % group != 0) return false;
    bool one_state = true;
    for (int k = i - group; k < i; ++k) one_state &= shared.states[k] == state;
    return one_state;
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
    wait_for_predecessor();
    extern __shared__ uint4 dynamic[];
    __shared__ Shared shared;
    auto* keys = reinterpret_cast<unsigned char*>(dynamic);  // bf16 [KEYS, KEY_STRIDE]; then the stages of each warp
    const unsigned keys_address = static_cast<unsigned>(__cvta_generic_to_shared(keys));
    const int warp = threadIdx.x / WARP, before = (static_cast<int>(blockIdx.x) - 1) * p.group;  // the first token known
    Pair pair;
    pair.stages = keys_address + KEYS * ROW_BYTES + warp * STAGES * STAGE_BYTES + threadIdx.x % WARP * sizeof(uint4);
    for (int i = warp; i < 3 * p.group; i += WARPS) {
        if (before + i >= 0 && before + i < p.num_tokens)
            read_index(p, before + i, shared.visible[i], &shared.states[i]);
        else if (threadIdx.x % WARP == 0)
            shared.states[i] = NO_KEYS;
    }
    __syncthreads();

    const int own_end = smaller(2 * p.group, p.num_tokens - before);
    for (int run = p.group, end; run < own_end; run = end) {
        end = run + 1;
        if (!begins_run(shared, run, p.group)) continue;
        const int state = shared.states[run];
        if (state < 0) {
            if (blockIdx.y == 0) fill(p, before + run, state == FOREIGN);
            continue;
        }
        while (end < 3 * p.group && !begins_run(shared, end, p.group)) ++end;
        const int end_row = (before + end) * p.num_heads;
        pair.first = (before + run) * p.num_heads + (blockIdx.y * WARPS + warp) * PAIR * TILE;
        if (pair.first < end_row) start_pair(p, pair, end_row);
        __syncthreads();  // nobody reads the keys of the run before any more
        if (threadIdx.x < MASK_WORDS) {
            unsigned word = 0;
            for (int i = run; i < end; ++i) word |= shared.visible[i][threadIdx.x];
            shared.wanted[threadIdx.x] = word;
        }
        __syncthreads();
        fetch_entries(p, keys, shared, state);
        wait_for_copies<0>();
        __syncthreads();
        spread_entries(p, keys, shared);
        __syncthreads();
        while (pair.first < end_row) {
            attend(p, keys_address, shared, pair, before);
            pair.first += gridDim.y * WARPS * PAIR * TILE;
            if (pair.first < end_row) start_pair(p, pair, end_row);
        }
    }
}
