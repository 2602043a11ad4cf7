"""The arithmetic of the ring and of a batch row: the Numba twins of device_kernels/ring.cuh, function by function.

Every size (window, ring, tokens_per_step) is an argument: a module-level constant would be frozen into Numba's disk cache.
`error_model="numpy"`: sizes are checked before a launch, so no division needs its test for zero (it costs a third of the time).
"""

from __future__ import annotations

import numpy as np
from numba import njit

INT32_LARGEST = 2**31 - 1

FREE, LIVE, FINISHED, ERROR, PAUSED = range(5)

(
    NO_ERROR,
    SEQLEN_Q_RANGE,
    Q_START_NEGATIVE,
    VALID_START_NEGATIVE,
    VALID_START_PAST_Q_START,
    POSITION_OVERFLOW,
    CHUNK_PAST_PROMPT_END,
    NUM_KEPT_RANGE,
    CHUNK_NOT_KEPT_WHOLE,
) = range(9)

TICKET_PADDING, TICKET_ERROR, TICKET_DEFERRED = range(
    3
)  # why a ticket has no tokens: it is (-1, reason, state_id or -1, 0)


@njit(cache=True, inline="always", error_model="numpy")
def window_begin(position, window, valid_start):
    """First position (inclusive) that the query at `position` sees."""
    return max(position - window + 1, valid_start, 0)


@njit(cache=True, inline="always", error_model="numpy")
def ring_slot(position, ring):
    """Slot (0 … ring-1) of a position within its sequence's ring."""
    return np.int64(np.uint32(position) % np.uint32(ring))  # a signed 64-bit modulo takes several times as long


@njit(cache=True, inline="always", error_model="numpy")
def history_start(begin, q_start, window):
    """First visible row (0 … window) of the history rows, which hold positions q_start-window … q_start-1."""
    return window - (q_start - min(begin, q_start))


@njit(cache=True, inline="always", error_model="numpy")
def chunk_start(begin, q_start):
    """First visible token (0-based, of this step's new tokens) of a query whose window begins at `begin`."""
    return max(begin - q_start, 0)


@njit(cache=True, inline="always", error_model="numpy")
def history_padding(q_start, valid_start, window):
    """Rows of zeros (0 … window) at the front of the history rows: positions below 0 or below valid_start."""
    return min(max(window - (q_start - valid_start), 0), window)


@njit(cache=True, inline="always", error_model="numpy")
def overwritten(j, seqlen_q, slots):
    """Whether a later token of the same step takes the slot of the j-th of seqlen_q tokens in a ring of `slots`."""
    return j < seqlen_q - slots


@njit(cache=True, inline="always", error_model="numpy")
def compressed_index(position, ratio, kv_cached_end):
    """Index of the pooled entry that `position` completes, or -1 when it completes none or the entry is cached."""
    if ring_slot(position + 1, ratio) == 0 and position >= kv_cached_end:
        return np.int64(np.uint32(position) // np.uint32(ratio))
    return np.int64(-1)


@njit(cache=True, inline="always", error_model="numpy")
def row_places(phase, seqlen_q, limit):
    """Token places that a row takes in a packed batch; `limit` is the most a row may have in this kind of batch."""
    return seqlen_q if phase == LIVE and 0 < seqlen_q <= limit else 0


@njit(cache=True, error_model="numpy")
def row_error(phase, seqlen_q, q_start, prompt_end, valid_start, limit):
    """ErrorCode of a row (docs/design.md, "prepare": rules 1 to 3), NO_ERROR for sound and for padding rows."""
    if phase != LIVE or seqlen_q == 0:
        return NO_ERROR
    prefilling = q_start < prompt_end
    if seqlen_q > limit:
        return NO_ERROR if prefilling else SEQLEN_Q_RANGE
    if seqlen_q < 0:
        return SEQLEN_Q_RANGE
    if q_start < 0:
        return Q_START_NEGATIVE
    if valid_start < 0:
        return VALID_START_NEGATIVE
    if valid_start > q_start:
        return VALID_START_PAST_Q_START
    if q_start > INT32_LARGEST - seqlen_q:
        return POSITION_OVERFLOW
    if prefilling and seqlen_q > prompt_end - q_start:
        return CHUNK_PAST_PROMPT_END
    return NO_ERROR


@njit(cache=True, error_model="numpy")
def row_error_value(error, seqlen_q, q_start, valid_start):
    """Return the offending value that goes with an error of `row_error`."""
    if error == SEQLEN_Q_RANGE or error == CHUNK_PAST_PROMPT_END:
        return seqlen_q
    if error == VALID_START_NEGATIVE or error == VALID_START_PAST_Q_START:
        return valid_start
    return q_start


@njit(cache=True, error_model="numpy")
def tail_begin(q_start, seqlen_q, prompt_end, window, tokens_per_step):
    """First position of a row's tail; past the end of a chunk that ends before it."""
    if q_start < prompt_end:
        return max(q_start, prompt_end - window)
    return q_start if seqlen_q <= tokens_per_step else max(q_start, q_start + seqlen_q - window)


@njit(cache=True, error_model="numpy")
def tail_valid_start(valid_start, q_start, seqlen_q, prompt_end, window, tokens_per_step):
    """Positions below it are missing for the layers that only ever run on tails."""
    begin = tail_begin(q_start, seqlen_q, prompt_end, window, tokens_per_step)
    behind_skipped = begin if begin > q_start else max(prompt_end, 0) - window  # now, or before
    return max(valid_start, behind_skipped)


@njit(cache=True, error_model="numpy")
def kept_error(num_kept, q, tokens_per_step):
    """ErrorCode of a result for a row of q tokens that is not prefilling; a long chunk is kept whole or not at all."""
    if q > tokens_per_step:
        return NO_ERROR if num_kept == q else CHUNK_NOT_KEPT_WHOLE
    return NUM_KEPT_RANGE if num_kept < 0 or num_kept > q else NO_ERROR


@njit(cache=True, error_model="numpy")
def kept_before_stop(kept, q_start, stop_at):
    """`kept`, cut so that q_start never passes stop_at (0: no stop)."""
    return max(0, min(kept, stop_at - q_start)) if stop_at > 0 else kept


@njit(cache=True, error_model="numpy")
def until_boundary(q_start, snapshot_every):
    """Tokens (1 … snapshot_every) from q_start to the next boundary: to the next multiple of snapshot_every, not 0 here."""
    return snapshot_every - q_start % snapshot_every


@njit(cache=True, error_model="numpy")
def next_seqlen_q(q_start, prompt_end, chunk_q, decode_q, tokens_per_step, max_prefill_tokens, snapshot_every):
    """seqlen_q of the step that starts at q_start: while prefilling the next chunk, which passes no boundary, then decode steps."""
    if q_start >= prompt_end:
        return decode_q if decode_q > 0 else tokens_per_step
    chunk = min(chunk_q if chunk_q > 0 else max_prefill_tokens, prompt_end - q_start)
    return min(chunk, until_boundary(q_start, snapshot_every)) if snapshot_every > 0 else chunk


@njit(cache=True, error_model="numpy")
def snapshot_boundary(before, after, head, valid_start, window, ring, snapshot_every):
    """Last boundary in (before, after], or -1 where there is none or a ring no longer holds all that a query from there on sees."""
    if snapshot_every <= 0:
        return -1
    boundary = after - after % snapshot_every
    whole = head - boundary <= ring - window and valid_start <= window_begin(boundary, window, 0)
    return boundary if boundary > max(before, 0) and whole else -1


E8M0_NAN = 255
E4M3_NAN = 0x7F
SCALE_BLOCK = 32  # values that share a scale byte: part of the format, as the bytes above are


@njit(cache=True, inline="always", error_model="numpy")
def e8m0_round_up(amax_bits):
    """Return the e8m0 byte of the smallest 2^e, e >= -127, with amax / 2^e <= 448; E8M0_NAN for an infinite or NaN amax."""
    exponent = amax_bits >> 23
    if exponent == 255:
        return E8M0_NAN
    return max(exponent - 8 + (1 if (amax_bits & 0x7FFFFF) > 0x600000 else 0), 0)


@njit(cache=True, inline="always", error_model="numpy")
def e4m3_round(bits):
    """Return the e4m3 byte of an fp32 (as bits) of magnitude <= 448, rounded to nearest even."""
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    if magnitude < 0x3C800000:  # below 2^-6: multiples of 2^-9
        exponent, mantissa = magnitude >> 23, magnitude & 0x7FFFFF
        shift = 141 - exponent  # places that the 24-bit significand loses
        if shift > 24:
            return sign  # less than half of the smallest
        significand = mantissa | 0x800000
        code = significand >> shift
        rest, half = significand & ((1 << shift) - 1), 1 << (shift - 1)
        if rest > half or (rest == half and code & 1):
            code += 1
        return sign | code
    return sign | (((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3))
