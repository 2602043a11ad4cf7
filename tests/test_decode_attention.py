"""Test that swa_decode_attention gives what fp64 attention over the named entries gives, and reads no other entry."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zos
from host_fallback.ring_load import dequantise

WIDTH, ENTRY = 512, 528
NAN_BYTE = 0xFF  # an entry of these is NaN: reading one too many shows
SCALE = WIDTH**-0.5
# of the largest value expected: queries, weights and outputs are rounded to bf16
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float32: 1e-5}


def dtypes(device: str) -> list[torch.dtype]:
    """Number formats that a device's implementation takes."""
    return [torch.bfloat16] if device == "cuda" else [torch.bfloat16, torch.float32]


def filled_cache(index: torch.Tensor, states: int, ring: int, gap: int, draws: torch.Generator) -> torch.Tensor:
    """A ring cache with normal entries where `index` names slots and NaN elsewhere, `gap` bytes between its states."""
    slab = torch.full((states * (ring * ENTRY + gap),), NAN_BYTE, dtype=torch.uint8, device=index.device)
    cache = slab.as_strided((states, ring, 1, ENTRY), (ring * ENTRY + gap, ENTRY, ENTRY, 1))
    named = index[(index >= 0) & (index < states * ring)].unique().long()
    values = torch.randn(len(named), WIDTH, generator=draws) * torch.exp2(
        3 * torch.rand(len(named), 1, generator=draws) - 3
    )
    torch.ops.zos.swa_ring_store(values.to(index.device), named, cache)
    return cache


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    index: torch.Tensor,
    lengths: torch.Tensor,
    sink: torch.Tensor | None,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the operator on poisoned outputs."""
    out, lse = torch.full_like(q, 77.0), torch.full(q.shape[:2], 77.0, device=q.device)
    torch.ops.zos.swa_decode_attention(q, cache, index, lengths, sink, out, lse, SCALE, group)
    return out, lse


def expected(
    q: torch.Tensor, cache: torch.Tensor, index: torch.Tensor, lengths: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in fp64, token by token: [T, H, D], log-sum [T, H]; zeros and -inf where a token has no key."""
    entries = cache.cpu().reshape(-1, ENTRY).numpy()
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for token, length in enumerate(lengths.tolist()):
        slots = index[token, :length].cpu()
        slots = slots[slots >= 0].long()
        if len(slots) == 0:
            continue
        keys = torch.from_numpy(dequantise(entries[slots.numpy()])).double()
        scores = q[token].cpu().double() @ keys.T * SCALE
        lse[token] = scores.logsumexp(1)
        total = lse[token] if sink is None else torch.logaddexp(lse[token], sink.cpu().double())
        out[token] = torch.exp(scores - total[:, None]) @ keys
    return out, lse


def assert_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    index: torch.Tensor,
    lengths: torch.Tensor,
    sink: torch.Tensor | None,
    group: int,
) -> None:
    """Compare the operator with fp64; tokens without keys must be zeros and -inf, exactly."""
    out, lse = attend(q, cache, index, lengths, sink, group)
    true_out, true_lse = expected(q, cache, index, lengths, sink)
    bound = TOLERANCE[q.dtype]
    without = torch.isneginf(true_lse)
    error = (out.cpu().double() - true_out).abs().amax(2) / true_out.abs().amax(2).clamp(min=1e-30)
    assert (error[~without] < bound).all(), f"relative error {error[~without].max()} at {error.argmax()}"
    assert (out.cpu()[without] == 0).all()
    assert torch.isneginf(lse.cpu()[without]).all()
    torch.testing.assert_close(lse.cpu().double()[~without], true_lse[~without], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("token_layout", ["packed", "strided"])
@pytest.mark.parametrize(("window", "drafts", "ring"), [(128, 5, 134), (128, 7, 144), (8, 3, 11), (40, 0, 64)])
def test_over_a_steps_index(device: str, token_layout: str, window: int, drafts: int, ring: int, seed: int) -> None:
    """Ragged rows, padding, short sequences, windows that begin at a valid start: each token sees its keys and no other."""
    rng, draws = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    states, rows = 9, 8
    svc = zos.MetadataService(states, rows, zos.RingGeometry(window, drafts, ring), device, token_layout=token_layout)
    for state_id in range(7):
        q_start = int(rng.integers(0, 3 * window))
        svc.admit(
            state_id,
            q_start=q_start,
            seqlen_q=int(rng.integers(1, drafts + 2)),
            swa_valid_start=int(rng.integers(0, q_start + 1)),
        )
    svc.set_batch([3, 0, -1, 6, 5, 1, 2, 4])
    metadata = svc.prepare()
    cache = filled_cache(metadata.kv_swa_index, states, ring, gap=96, draws=draws)
    for heads, dtype in ((64, dtypes(device)[0]), (16, dtypes(device)[-1])):
        sink = torch.randn(heads, generator=draws).to(device) if heads == 16 else None
        q = torch.randn(metadata.tokens, heads, WIDTH, generator=draws).to(device, dtype)
        assert_attention(q, cache, metadata.kv_swa_index, metadata.swa_len, sink, svc.geometry.tokens_per_step)


@pytest.mark.parametrize(("heads", "group"), [(16, 6), (48, 1), (128, 5), (16, 40)])
def test_over_any_index(device: str, heads: int, group: int, seed: int) -> None:
    """Slots in any order, with holes, groups that mix states, entries at any address: what the operator promises."""
    rng, draws = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    tokens, columns, ring, states = 67, 150, 141, 3
    of_token = np.repeat(rng.integers(0, states, tokens), rng.integers(1, 3 * group + 1, tokens))[
        :tokens
    ]  # runs of one state
    index = np.full((tokens, columns), -1, np.int32)
    for token in range(tokens):
        slots = rng.permutation(ring)[: rng.integers(0, 130) if rng.random() < 0.9 else 0]
        index[token, np.sort(rng.permutation(columns)[: len(slots)])] = of_token[token] * ring + slots
    lengths = rng.integers(0, columns + 1, tokens).astype(np.int32)
    index_on, lengths_on = torch.from_numpy(index).to(device), torch.from_numpy(lengths).to(device)
    within = torch.where(torch.arange(columns, device=device) < lengths_on[:, None], index_on, -1)
    cache = filled_cache(within, states, ring, gap=int(rng.integers(0, 64)), draws=draws)
    sink = torch.randn(heads, generator=draws).to(device)
    q = torch.randn(tokens, heads, WIDTH, generator=draws).to(device, dtypes(device)[0])
    assert_attention(q, cache, index_on, lengths_on, sink, group)


def test_nonsense_is_nan(device: str, seed: int) -> None:
    """An index of two states, or past the cache, gives NaN for that token and leaves its neighbours alone."""
    draws = torch.Generator().manual_seed(seed)
    ring = 16
    index = torch.arange(8, dtype=torch.int32).repeat(4, 1).to(device)
    index[1, 3] = ring + 3
    index[2, 7] = 2 * ring
    lengths = torch.full((4,), 8, dtype=torch.int32, device=device)
    cache = filled_cache(index, states=2, ring=ring, gap=0, draws=draws)
    q = torch.randn(4, 16, WIDTH, generator=draws).to(device, torch.bfloat16)
    out, lse = attend(q, cache, index, lengths, None, 4)
    assert torch.isnan(out[1:3]).all() and torch.isnan(lse[1:3]).all()
    good = [0, 3]
    assert_attention(q[good], cache, index[good], lengths[good], None, 4)
    alone, _ = attend(q[good], cache, index[good], lengths[good], None, 2)
    assert torch.equal(out[good], alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 512, dtype=torch.bfloat16)}, r"shape of q"),
        ({"q": torch.zeros(4, 16, 512, dtype=torch.float64)}, r"dtype of q"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"shape of swa_len"),
        ({"index": torch.zeros(4, 8, dtype=torch.int64)}, r"dtype of kv_swa_index"),
        ({"sink": torch.zeros(15)}, r"shape of sink"),
        ({"group": 0}, r"tokens_per_step=0"),
    ],
)
def test_wrong_arguments(device: str, change: dict[str, torch.Tensor | int], message: str) -> None:
    """A tensor that does not fit is named before anything is launched."""
    arguments = {
        "q": torch.zeros(4, 16, WIDTH, dtype=torch.bfloat16),
        "cache": torch.zeros(2, 16, 1, ENTRY, dtype=torch.uint8),
        "index": torch.zeros(4, 8, dtype=torch.int32),
        "lengths": torch.zeros(4, dtype=torch.int32),
        "sink": None,
        "group": 6,
        **change,
    }
    on_device = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }
    with pytest.raises(ValueError, match=message):
        attend(**on_device)


@pytest.mark.gpu
def test_what_the_kernel_does_not_take() -> None:
    """Other number formats, head counts and rings are refused by name, not computed wrongly."""

    def run(heads: int = 16, ring: int = 16, dtype: torch.dtype = torch.bfloat16) -> None:
        q = torch.zeros(2, heads, WIDTH, dtype=dtype, device="cuda")
        cache = torch.zeros(2, ring, 1, ENTRY, dtype=torch.uint8, device="cuda")
        index = torch.zeros(2, 4, dtype=torch.int32, device="cuda")
        attend(q, cache, index, torch.zeros(2, dtype=torch.int32, device="cuda"), None, 2)

    run()
    for wrong, message in (
        ({"heads": 8}, "multiple of 16"),
        ({"ring": 145}, "at most 144"),
        ({"dtype": torch.float32}, "bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**wrong)
