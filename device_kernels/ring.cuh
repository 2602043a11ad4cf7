// The arithmetic of the ring and of a batch row: pure functions, the same names as host_fallback/ring.py.
//
// Compiles as CUDA (NVRTC, nvcc) and as plain C++17, so that it can be tested without a GPU. Positions, lengths and ids are
// int32, 0 <= position < 2^31 - 1; nothing here overflows for values that `row_error` lets through.
#pragma once

#ifdef __CUDACC__
#define ZOS_HD __host__ __device__ __forceinline__
#else
#include <cstring>
#define ZOS_HD inline
#endif

namespace zos {

#ifdef __CUDACC__
// First statement of a kernel that is launched while the one before it still runs (`Kernel(overlaps=True)`): the next may be launched
// as well, and nothing before is read or overwritten until it has ended. Saves a launch's 0.4 µs; without effect before sm_90.
__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

constexpr int INT32_LARGEST = 0x7fffffff;

enum Phase { FREE = 0, LIVE = 1, FINISHED = 2, ERROR = 3, PAUSED = 4 };

enum ErrorCode {
    NO_ERROR = 0,
    SEQLEN_Q_RANGE = 1,
    Q_START_NEGATIVE = 2,
    VALID_START_NEGATIVE = 3,
    VALID_START_PAST_Q_START = 4,
    POSITION_OVERFLOW = 5,
    CHUNK_PAST_PROMPT_END = 6,
    NUM_KEPT_RANGE = 7,
    CHUNK_NOT_KEPT_WHOLE = 8,
};

// Why a ticket has no tokens: it is (-1, reason, state_id or -1, 0).
enum NoTokens { TICKET_PADDING = 0, TICKET_ERROR = 1, TICKET_DEFERRED = 2 };

ZOS_HD int smaller(int a, int b) { return a < b ? a : b; }
ZOS_HD int larger(int a, int b) { return a > b ? a : b; }

// A divisor known before the launch, with the multiplier that replaces the division: exact for 0 <= n < 2^31, 1 <= divisor.
struct Divisor {
    int divisor;
    unsigned multiplier;  // floor(2^(31 + shift) / divisor) + 1
    int shift;            // ceil(log2(divisor))
};

ZOS_HD Divisor make_divisor(int divisor) {
    int shift = 0;
    while ((1LL << shift) < divisor) ++shift;
    return {divisor, static_cast<unsigned>(((1ULL << (31 + shift)) / divisor) + 1), shift};
}

ZOS_HD int quotient(int n, Divisor d) {
    const unsigned twice = static_cast<unsigned>(n) << 1;  // (2n * m) >> 32 keeps the product's high half in one instruction
#ifdef __CUDA_ARCH__
    return static_cast<int>(__umulhi(twice, d.multiplier) >> d.shift);
#else
    return static_cast<int>((static_cast<unsigned long long>(twice) * d.multiplier >> 32) >> d.shift);
#endif
}

ZOS_HD int remainder(int n, Divisor d) { return n - quotient(n, d) * d.divisor; }

// ---- the window of a query -------------------------------------------------------------------------------------------------

// First position (inclusive) that the query at `position` sees.
ZOS_HD int window_begin(int position, int window, int valid_start) {
    return larger(larger(position - window + 1, valid_start), 0);
}

// Slot (0 .. ring - 1) of a position within its sequence's ring.
ZOS_HD int ring_slot(int position, Divisor ring) { return remainder(position, ring); }

// The slot `steps` (0 .. ring - 1) places after `slot`, going round.
ZOS_HD int ring_advance(int slot, int steps, int ring) {
    const int next = slot + steps;
    return next >= ring ? next - ring : next;
}

// First visible row (0 .. window) of a sequence's `window` history rows, which hold positions q_start - window .. q_start - 1.
ZOS_HD int history_start(int begin, int q_start, int window) { return window - (q_start - smaller(begin, q_start)); }

// First visible token (0-based, of this step's new tokens) of a query whose window begins at `begin`.
ZOS_HD int chunk_start(int begin, int q_start) { return larger(begin - q_start, 0); }

// Rows of zeros (0 .. window) at the front of a sequence's `window` history rows: positions below 0 or below valid_start.
ZOS_HD int history_padding(int q_start, int valid_start, int window) {
    return smaller(larger(window - (q_start - valid_start), 0), window);
}

// Whether a later token of the same step takes the slot of the j-th of seqlen_q tokens in a ring of `slots`.
ZOS_HD bool overwritten(int j, int seqlen_q, int slots) { return j < seqlen_q - slots; }

// Index of the pooled entry that the token at `position` completes, or -1 when it completes none or the entry is cached.
ZOS_HD int compressed_index(int position, Divisor ratio, int kv_cached_end) {
    const bool completes = remainder(position + 1, ratio) == 0;
    return completes && position >= kv_cached_end ? quotient(position, ratio) : -1;
}

// ---- an entry's numbers (docs/design.md, "Entry") --------------------------------------------------------------

ZOS_HD float float_of(unsigned bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

ZOS_HD unsigned bits_of(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

// Product that keeps subnormals; CuPy compiles with -ftz=true, which would flush them.
ZOS_HD float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
#else
    return a * b;
#endif
}

constexpr int E8M0_NAN = 255;
constexpr int E4M3_NAN = 0x7F;

// e8m0 byte of the smallest power of two 2^e, e >= -127, with amax / 2^e <= 448 = 1.75 * 2^8; E8M0_NAN for an infinite or NaN amax.
// `amax_bits`: the fp32 bits of a block's largest magnitude; among NaN and numbers, the largest bits are a NaN's.
ZOS_HD int e8m0_round_up(unsigned amax_bits) {
    const int exponent = static_cast<int>(amax_bits >> 23), past_448 = (amax_bits & 0x7FFFFFu) > 0x600000u;
    return exponent == 255 ? E8M0_NAN : larger(exponent - 8 + past_448, 0);
}

// 2^(byte - 127) of an e8m0 byte: byte 0 is a subnormal, not 0, and byte 255 is NaN.
ZOS_HD float e8m0_value(int byte) {
    return float_of(byte == 0 ? 0x00400000u : byte == E8M0_NAN ? 0x7FC00000u : static_cast<unsigned>(byte) << 23);
}

// 2^(127 - byte), what a block's values are multiplied with before they are rounded; byte 0 … 247.
ZOS_HD float e8m0_inverse(int byte) { return float_of(static_cast<unsigned>(254 - byte) << 23); }

// e4m3 byte of a value of magnitude <= 448, rounded to nearest even.
ZOS_HD int e4m3_round(float value) {
    const unsigned bits = bits_of(value), magnitude = bits & 0x7FFFFFFFu;
    const int sign = static_cast<int>(bits >> 24 & 0x80u);
    // Below 2^-6 codes are multiples of 2^-9: adding 2^14, whose last place is 2^-9, leaves the code in the last bits of the sum.
    if (magnitude < 0x3C800000u) return sign | static_cast<int>(bits_of(float_of(magnitude) + 16384.0f) & 0xFu);
    return sign | static_cast<int>(((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3));
}

// Value of an e4m3 byte: its exponent and mantissa, read as an fp32's, are too small by 2^120.
ZOS_HD float e4m3_value(int byte) {
    const unsigned magnitude = static_cast<unsigned>(byte) & 0x7Fu, sign = (static_cast<unsigned>(byte) & 0x80u) << 24;
    if (magnitude == E4M3_NAN) return float_of(sign | 0x7FC00000u);
    return float_of(sign | bits_of(multiply(float_of(magnitude << 20), float_of(247u << 23))));
}

// ---- what a batch row is (docs/design.md, "prepare": rules 1 to 3) -------------------------------------------------------------------

// Token places that a row takes in a packed batch. `limit`: most tokens a row may have in this kind of batch.
ZOS_HD int row_places(int phase, int seqlen_q, int limit) {
    return phase == LIVE && seqlen_q > 0 && seqlen_q <= limit ? seqlen_q : 0;
}

// The first rule that a row breaks. Written from the last rule to the first, so that it needs no branch.
ZOS_HD int row_error(int phase, int seqlen_q, int q_start, int prompt_end, int valid_start, int limit) {
    const bool prefilling = q_start < prompt_end;
    int error = NO_ERROR;
    if (prefilling && seqlen_q > prompt_end - larger(q_start, 0)) error = CHUNK_PAST_PROMPT_END;
    if (q_start > INT32_LARGEST - larger(seqlen_q, 0)) error = POSITION_OVERFLOW;
    if (valid_start > q_start) error = VALID_START_PAST_Q_START;
    if (valid_start < 0) error = VALID_START_NEGATIVE;
    if (q_start < 0) error = Q_START_NEGATIVE;
    if (seqlen_q > limit) error = prefilling ? NO_ERROR : SEQLEN_Q_RANGE;
    if (seqlen_q < 0) error = SEQLEN_Q_RANGE;
    return phase == LIVE && seqlen_q != 0 ? error : NO_ERROR;
}

// The offending value that goes with an error of `row_error`.
ZOS_HD int row_error_value(int error, int seqlen_q, int q_start, int valid_start) {
    if (error == SEQLEN_Q_RANGE || error == CHUNK_PAST_PROMPT_END) return seqlen_q;
    return error == VALID_START_NEGATIVE || error == VALID_START_PAST_Q_START ? valid_start : q_start;
}

// ---- the tail of a prefill (docs/design.md, "Prefill tail") ---------------------------------------------------------------------------

// First position of a row's tail; past the end of a chunk that ends before it.
ZOS_HD int tail_begin(int q_start, int seqlen_q, int prompt_end, int window, int tokens_per_step) {
    if (q_start < prompt_end) return larger(q_start, prompt_end - window);
    return seqlen_q <= tokens_per_step ? q_start : larger(q_start, q_start + seqlen_q - window);
}

// Positions below it are missing for the layers that only ever run on tails.
ZOS_HD int tail_valid_start(int valid_start, int q_start, int seqlen_q, int prompt_end, int window, int tokens_per_step) {
    const int begin = tail_begin(q_start, seqlen_q, prompt_end, window, tokens_per_step);
    const int behind_skipped = begin > q_start ? begin : larger(prompt_end, 0) - window;  // now, or before
    return larger(valid_start, behind_skipped);
}

// ---- how a sequence moves on (docs/design.md, "commit") ------------------------------------------------------------------------------

// Error of a result for a row of q tokens that is not prefilling. A chunk longer than a decode step is kept whole or not at all.
ZOS_HD int kept_error(int num_kept, int q, int tokens_per_step) {
    if (q > tokens_per_step) return num_kept == q ? NO_ERROR : CHUNK_NOT_KEPT_WHOLE;
    return num_kept < 0 || num_kept > q ? NUM_KEPT_RANGE : NO_ERROR;
}

// `kept`, cut so that q_start never passes stop_at (0: no stop).
ZOS_HD int kept_before_stop(int kept, int q_start, int stop_at) {
    return stop_at > 0 ? larger(0, smaller(kept, stop_at - q_start)) : kept;
}

// Tokens (1 .. snapshot_every) from q_start to the next boundary: to the next multiple of snapshot_every, which is not 0 here.
ZOS_HD int until_boundary(int q_start, int snapshot_every) { return snapshot_every - q_start % snapshot_every; }

// seqlen_q of the step that starts at q_start: the next chunk while prefilling, then decode steps. A 0 takes the default; no chunk
// passes a boundary.
ZOS_HD int next_seqlen_q(int q_start, int prompt_end, int chunk_q, int decode_q, int tokens_per_step, int max_prefill_tokens,
                         int snapshot_every) {
    if (q_start >= prompt_end) return decode_q > 0 ? decode_q : tokens_per_step;
    const int chunk = smaller(chunk_q > 0 ? chunk_q : max_prefill_tokens, prompt_end - q_start);
    return snapshot_every > 0 ? smaller(chunk, until_boundary(q_start, snapshot_every)) : chunk;
}

// The last boundary in (before, after], which a step's q_start went through, or -1 where there is none or a ring no longer holds all
// that a query from there on sees: `head` has overwritten some of it, or it was missing from the start.
ZOS_HD int snapshot_boundary(int before, int after, int head, int valid_start, int window, int ring, int snapshot_every) {
    if (snapshot_every <= 0) return -1;
    const int boundary = after - after % snapshot_every;
    const bool whole = head - boundary <= ring - window && valid_start <= window_begin(boundary, window, 0);
    return boundary > larger(before, 0) && whole ? boundary : -1;
}

}  // namespace zos
