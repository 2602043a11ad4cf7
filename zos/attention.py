"""Attention over sliding windows in torch: decode reads MXFP8 rings, prefill loaded history and its own vectors.

Every entry is key and value of all heads (MQA). Sums are made in float32, in float64 for float64 queries. Nothing here waits for
the host, shapes are fixed, so all of it may be captured; it is the reference that faster kernels are held against.
"""

from __future__ import annotations

import torch

import zos.ops  # noqa: F401  registers the kernel's operator
from device_kernels import decode_attention
from zos.entry import EntryFormat

MXFP8 = EntryFormat.mxfp8()
E8M0_BIAS, E8M0_NAN = 127, 255
PREFILL_BLOCK = 64  # queries whose keys are gathered at once: bounds the memory of a long chunk


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type that sums over values of `dtype` are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dequantise(entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of MXFP8 entries uint8 [..., 528]: [..., 512] in float32 or float64, which hold them exactly."""
    elements = entries[..., : MXFP8.fp8_values].view(torch.float8_e4m3fn).to(dtype)
    scale_bytes = entries[..., MXFP8.fp8_values :]
    # Made in double: 2^-127, which byte 0 stands for, is subnormal in float32.
    scales = torch.exp2(scale_bytes.double() - E8M0_BIAS).to(dtype).masked_fill(scale_bytes == E8M0_NAN, torch.nan)
    values: torch.Tensor = (elements.unflatten(-1, (MXFP8.scales, MXFP8.scale_block)) * scales[..., None]).flatten(-2)
    return values


def attend(
    q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, softmax_scale: float, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over key lists of their own.

    Parameters
    ----------
    q : torch.Tensor
        [..., n, D], n queries (of tokens, of heads) of each list.
    keys : torch.Tensor
        [..., K, D], key and value; those that no query sees must be finite.
    seen : torch.Tensor
        bool [..., n or 1, K].
    softmax_scale : float
        What scores are multiplied by.
    sink : torch.Tensor, optional
        [..., n] or shorter: a score that takes weight and adds no value.

    Returns
    -------
    out, lse : torch.Tensor
        [..., n, D] in the type of the sums, and [..., n], the log of the weights' sum without the sink; zeros and -inf where a
        query sees nothing.
    """
    dtype = accumulation_dtype(q.dtype)
    keys = keys.to(dtype)
    scores = (q.to(dtype) @ keys.transpose(-1, -2) * softmax_scale).masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(dtype).expand_as(lse))
    # A query that sees nothing has only scores of -inf: exp(-inf - 0) = 0.
    weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0)[..., None])
    return weights @ keys, lse


def swa_decode_attention(
    q: torch.Tensor,
    ring: torch.Tensor,
    kv_swa_index: torch.Tensor,
    swa_len: torch.Tensor,
    softmax_scale: float,
    sink: torch.Tensor | None = None,
    tokens_per_step: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a decode step's queries over the ring entries that its metadata name; the step's own are stored before.

    On CUDA by the kernel `torch.ops.zos.swa_decode_attention`, where it takes such queries and rings; else by
    `reference_decode_attention`.

    Parameters
    ----------
    q : torch.Tensor
        [T, H, 512], bfloat16, float32 or float64.
    ring : torch.Tensor
        uint8 [S, R, 1, 528], `SwaCache.layer`; states may be strided.
    kv_swa_index : torch.Tensor
        int32 [T, K]: state * R + slot, -1 for none.
    swa_len : torch.Tensor
        int32 [T]: columns past it are not read.
    softmax_scale : float
        What scores are multiplied by.
    sink : torch.Tensor, optional
        [H]: a score of each head that takes weight and adds no value.
    tokens_per_step : int
        Neighbouring tokens that are likely of one state, as a row's are: they share what is read.

    Returns
    -------
    out, lse : torch.Tensor
        [T, H, 512] like q, and [T, H] float32 (float64 for float64 queries): the log of the weights' sum without the sink, for
        `merge`. A token without keys gives zeros and -inf.
    """
    if not _has_kernel(q, ring):
        return reference_decode_attention(q, ring, kv_swa_index, swa_len, softmax_scale, sink)
    q = q.contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    sinks = None if sink is None else sink.to(torch.float32)
    torch.ops.zos.swa_decode_attention(q, ring, kv_swa_index, swa_len, sinks, out, lse, softmax_scale, tokens_per_step)
    return out, lse


def _has_kernel(q: torch.Tensor, ring: torch.Tensor) -> bool:
    """Whether the kernel takes such queries and such a ring on their device."""
    return (
        q.device.type == "cuda"
        and q.dtype == torch.bfloat16
        and q.shape[1] % decode_attention.HEADS_OF_A_TILE == 0
        and q.shape[2] == decode_attention.WIDTH
        and ring.shape[1] <= decode_attention.LARGEST_RING
        and decode_attention.fits(q.device)
    )


def reference_decode_attention(
    q: torch.Tensor,
    ring: torch.Tensor,
    kv_swa_index: torch.Tensor,
    swa_len: torch.Tensor,
    softmax_scale: float,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `swa_decode_attention`, in torch on any device."""
    slots = ring.shape[1]
    column = torch.arange(kv_swa_index.shape[1], device=q.device)
    seen = (kv_swa_index >= 0) & (column < swa_len[:, None])
    index = kv_swa_index.masked_fill(~seen, 0).long()
    if (
        ring.shape[0] * slots < index.numel()
    ):  # neighbouring queries see mostly the same: dequantise what they share once
        keys = dequantise(ring.flatten(0, 2), accumulation_dtype(q.dtype))[index]
    else:
        keys = dequantise(ring[index // slots, index % slots, 0], accumulation_dtype(q.dtype))
    keys = keys.masked_fill_(~seen[..., None], 0)  # the entry read in place of none may hold NaN
    out, lse = attend(q, keys, seen[:, None], softmax_scale, sink)
    return out.to(q.dtype), lse


def swa_prefill_attention(
    q: torch.Tensor,
    history: torch.Tensor,
    chunk: torch.Tensor,
    pivots: torch.Tensor,
    window: int,
    softmax_scale: float,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a prefill step's queries over what they see of the loaded history and of the step's own vectors.

    Parameters
    ----------
    q : torch.Tensor
        [T, H, D].
    history : torch.Tensor
        [B * W, D], what `swa_ring_load` filled.
    chunk : torch.Tensor
        [T, D], the step's own vectors as a reader of the ring will see them (`swa_ring_store`'s cast_back).
    pivots : torch.Tensor
        int32 [T, 4], `PrefillMetadata.kv_swa_full_index_pivots`.
    window : int
        W, the most keys of a query.
    softmax_scale, sink
        As `swa_decode_attention`.

    Returns
    -------
    out, lse : torch.Tensor
        As `swa_decode_attention`.
    """
    buffer = torch.cat([history, chunk]).to(accumulation_dtype(q.dtype))
    index, seen = expand_pivots(pivots, window)
    parts = []
    for begin in range(0, len(q), PREFILL_BLOCK):
        block = slice(begin, begin + PREFILL_BLOCK)
        keys = buffer[index[block]].masked_fill_(~seen[block, :, None], 0)
        parts.append(attend(q[block], keys, seen[block, None], softmax_scale, sink))
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out.to(q.dtype), lse


def expand_pivots(pivots: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that pivots int32 [T, 4] name, oldest first: int64 [T, W], and bool [T, W], whether a column names one (0 where not)."""
    first, first_length, second, second_length = pivots.long()[:, :, None].unbind(1)
    column = torch.arange(window, device=pivots.device)
    row = torch.where(column < first_length, first + column, second + column - first_length)
    seen = column < first_length + second_length
    return row.masked_fill(~seen, 0), seen


def merge(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over two key lists together, from each one's own results without a sink: [T, H, D] like out1.

    Parameters
    ----------
    out1, out2 : torch.Tensor
        [T, H, D].
    lse1, lse2 : torch.Tensor
        [T, H].
    sink : torch.Tensor, optional
        [H], counted once.
    """
    total = torch.logaddexp(lse1, lse2)
    if sink is not None:
        total = torch.logaddexp(total, sink.to(total.dtype).expand_as(total))
    total = total.masked_fill(total == -torch.inf, 0)
    weight1, weight2 = (torch.exp(lse - total)[..., None] for lse in (lse1, lse2))
    return (out1 * weight1 + out2 * weight2).to(out1.dtype)
