"""Test that the ring's entries hold what MXFP8 says, byte for byte, and that nothing beside them changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zos
from tests.reference import assert_bitwise_equal

WIDTH, ENTRY, RING = 512, 528, 134
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cache(device: str, states: int = 4, fill: int = 0x11) -> torch.Tensor:
    """A layer's view with gaps between the states' rings."""
    slab = torch.full((states * (RING * ENTRY + 96),), fill, dtype=torch.uint8, device=device)
    return slab.as_strided((states, RING, 1, ENTRY), (RING * ENTRY + 96, ENTRY, ENTRY, 1))


def store(
    values: torch.Tensor, slots: list[int], swa_cache: torch.Tensor, cast_back: bool = False
) -> torch.Tensor | None:
    """Store rows at slots; returns what a reader sees."""
    back = torch.full_like(values, 77.0) if cast_back else None
    write_slot = torch.tensor(slots, dtype=torch.int64, device=values.device)
    torch.ops.zos.swa_ring_store(values, write_slot, swa_cache, back)
    return back


def reference_entries(values: torch.Tensor) -> np.ndarray:
    """Entries by torch's own float8 cast and exact powers of two, in float64."""
    x = values.cpu().double().reshape(len(values), -1, 32)
    amax = x.abs().amax(2)
    bad = ~torch.isfinite(x).all(2)
    exponent = torch.ceil(torch.log2(torch.where((amax > 0) & ~bad, amax, 2.0**-140) / 448)).long()
    for step in (-1, 1):  # log2 may be off by one near a power of two: take the smallest exponent that fits
        lower = amax / torch.pow(2.0, (exponent + step).double()) <= 448
        exponent = torch.where(
            lower if step < 0 else ~(amax / torch.pow(2.0, exponent.double()) <= 448), exponent + step, exponent
        )
    exponent = exponent.clamp(min=-127)
    elements = (x / torch.pow(2.0, exponent.double())[..., None]).float().to(torch.float8_e4m3fn).view(torch.uint8)
    elements[bad] = 0x7F
    scales = torch.where(bad, 255, exponent + 127).to(torch.uint8)
    return torch.cat([elements.reshape(len(values), -1), scales], 1).numpy()


def samples(seed: int, rows: int = 64) -> torch.Tensor:
    """Rows of every magnitude: blocks from the smallest subnormals to near overflow, zeros, ties, infinities and NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 16, 32)) * 2.0 ** rng.integers(-149, 120, (rows, 16, 1))
    x[rng.random((rows, 16)) < 0.05] = 0
    x[0, 0] = np.arange(32) * 0.5 + 0.0625  # ties of e4m3
    x[1, 0, :4] = (448, -448, 0.001953125, 0.0009765625)
    x[2, 0, 3], x[2, 1, 5], x[2, 2, 9] = np.inf, -np.inf, np.nan
    return torch.from_numpy(x.reshape(rows, WIDTH).astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries(device: str, dtype: torch.dtype, seed: int) -> None:
    """Every byte of every entry against torch's float8 cast, for subnormals, ties, infinities and NaN alike."""
    values = samples(seed).to(dtype).to(device)
    view = cache(device)
    store(values, list(range(64)), view)
    assert_bitwise_equal(view[0, :64, 0], reference_entries(values), "entries")


@pytest.mark.parametrize(
    ("amax", "scale", "element"),
    [(448.0, 127, 0x7E), (450.0, 128, 0x76), (500.0, 128, 0x78), (448.4375, 128, 0x76), (0.0, 0, 0), (2.0**-149, 0, 0)],
)
def test_a19_scales_round_up(device: str, amax: float, scale: int, element: int) -> None:
    """The largest element never saturates: the scale is the smallest power of two that fits, from the fp32 amax."""
    values = torch.zeros(1, WIDTH, device=device)
    values[0, 7] = amax
    view = cache(device)
    back = store(values, [5], view, cast_back=True)
    assert view[0, 5, 0, WIDTH].item() == scale
    assert view[0, 5, 0, 7].item() == element
    assert back is not None and back[0, 7].item() == {448.0: 448, 450.0: 448, 500.0: 512, 448.4375: 448}.get(amax, 0)


def test_a02_skipped_tokens_write_nothing(device: str) -> None:
    """Slot -1, and any other that the cache does not have, is skipped: only the live rows' entries change, no gap byte either."""
    view = cache(device)
    slab = torch.as_strided(view, (view.stride(0) * 4,), (1,))
    before = slab.clone()
    values = torch.ones(12, WIDTH, device=device)
    store(values, [0, 1, 2, 3, 4, 5, -1, -1, 4 * RING, 2**40, -(2**40), -2], view)
    changed = (slab != before).nonzero().flatten().tolist()
    assert {byte // ENTRY for byte in changed} <= set(range(6))
    for row in range(6):
        assert (view[0, row, 0, :WIDTH] == 0x78).all() and (view[0, row, 0, WIDTH:] == 119).all()


@pytest.mark.parametrize("offset", [0, 1, 4, 8, 16])
@pytest.mark.parametrize("pitch", [528, 529, 544, 584])
def test_a17_any_address(device: str, offset: int, pitch: int, seed: int) -> None:
    """Views at any offset and pitch hold the bytes that an aligned one holds; no misaligned access."""
    values = samples(seed, 8).to(device)
    aligned = cache(device)
    store(values, list(range(8)), aligned)
    raw = torch.zeros(offset + 2 * RING * pitch, dtype=torch.uint8, device=device)
    view = raw.as_strided((2, RING, 1, ENTRY), (RING * pitch, pitch, ENTRY, 1), offset)
    shifted = torch.zeros(8 * WIDTH + 1, device=device)[1:].view(8, WIDTH)
    store(shifted.copy_(values), list(range(8)), view)
    assert_bitwise_equal(view[0, :8], aligned[0, :8], "entries")
    plan = torch.tensor([[[0, 0, 0, 8], [-1, 0, 0, 0], [-1, 0, 0, 0]]], dtype=torch.int32, device=device)
    loaded = [torch.full((8, WIDTH), 9.0, device=device) for _ in range(2)]
    for source, out in zip((view, aligned), loaded, strict=True):
        torch.ops.zos.swa_ring_load(source, plan, out, 8)
    assert_bitwise_equal(loaded[0].view(torch.int32), loaded[1].view(torch.int32), "loaded")


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_back_is_what_a_reader_sees(device: str, dtype: torch.dtype, seed: int) -> None:
    """Prefill attends the numbers that decode will read, also for tokens whose slot a later one takes."""
    values = samples(seed).to(dtype).to(device)
    view = cache(device)
    back = store(values, [*range(60), -1, -1, -1, -1], view, cast_back=True)
    out = torch.full((64, WIDTH), 9.0, dtype=dtype, device=device)
    plan = torch.tensor([[[0, 0, 0, 60], [-1, 0, 60, 4], [-1, 0, 0, 0]]], dtype=torch.int32, device=device)
    torch.ops.zos.swa_ring_load(view, plan, out, 64)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    assert back is not None
    numbers = ~torch.isnan(out[:60])
    assert_bitwise_equal(torch.isnan(back[:60]).int(), torch.isnan(out[:60]).int(), "NaN")
    assert_bitwise_equal(back[:60].view(kind)[numbers], out[:60].view(kind)[numbers], "cast back")
    assert not (back[60:] == 77.0).any(), "a skipped token's cast back is still wanted"
    assert (out[60:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a18_all_bytes(device: str, dtype: torch.dtype) -> None:
    """All 256 scale bytes times all 256 element bytes, exactly: byte 0 is 2^-127 and not 0, byte 255 is NaN and not infinity."""
    view = cache(device, states=4)
    elements = torch.arange(256, dtype=torch.uint8).repeat(2)
    for scale in range(256):
        view[scale // RING, scale % RING, 0, :WIDTH] = elements.to(device)
        view[scale // RING, scale % RING, 0, WIDTH:] = scale
    out = torch.full((256, WIDTH), 9.0, dtype=dtype, device=device)
    plan = torch.tensor([[[0, 0, 0, 134], [1, 0, 134, 122], [-1, 0, 0, 0]]], dtype=torch.int32, device=device)
    torch.ops.zos.swa_ring_load(view, plan, out, 256)
    value = elements.view(torch.float8_e4m3fn).double()
    scales = torch.pow(2.0, torch.arange(256).double() - 127)
    scales[255] = torch.nan
    expected = (value[None] * scales[:, None]).float().to(dtype)
    assert_bitwise_equal(torch.isnan(out).int(), torch.isnan(expected).int(), "NaN")
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    numbers = ~torch.isnan(expected)
    assert_bitwise_equal(out.cpu().view(kind)[numbers], expected.view(kind)[numbers], "values")
    if dtype == torch.bfloat16:
        assert out[0, 0x38].view(torch.int16).item() == 0x0040  # 1.0 * 2^-127


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_paths_write_the_same_bytes(dtype: torch.dtype, seed: int) -> None:
    """Entries, cast back and loads of every kind of value, NaN payloads included, bit for bit on both devices."""
    found = []
    values = samples(seed, 130).to(dtype)
    for device in ("cpu", "cuda"):
        view = cache(device)
        back = store(values.to(device), list(range(130)), view, cast_back=True)
        for scale in range(256):
            view[2 + scale // RING, scale % RING, 0, :WIDTH] = torch.arange(WIDTH, device=device).to(torch.uint8)
            view[2 + scale // RING, scale % RING, 0, WIDTH:] = scale
        plan = torch.tensor(
            [[[0, 0, 0, 130], [-1, 0, 0, 0], [-1, 0, 0, 0]], [[2, 0, 130, 130], [-1, 0, 0, 0], [-1, 0, 0, 0]],
             [[3, 0, 260, 122], [-1, 0, 382, 8], [-1, 0, 0, 0]]], dtype=torch.int32, device=device,
        )  # fmt: skip
        out = torch.full((390, WIDTH), 9.0, dtype=dtype, device=device)
        torch.ops.zos.swa_ring_load(view, plan, out, 130)
        assert back is not None
        found.append([tensor.cpu().view(torch.uint8) for tensor in (view[:2].contiguous(), back, out)])
    for name, host, other in zip(("entries", "cast back", "loaded"), *found, strict=True):
        assert_bitwise_equal(other, host, name)


def test_a20_missing_history_is_zero(device: str) -> None:
    """Never written slots hold NaN: the load gives exact zeros for missing positions and real history after them, nothing else."""
    svc = zos.MetadataService(capacity=4, max_batch=1, device=device, max_prefill_tokens=64)
    view = cache(device, fill=0x7F)
    history = torch.randn(20, WIDTH, device=device)
    store(history, [3 * RING + position for position in range(20)], view)
    svc.admit(state_id=3, q_start=20, seqlen_q=4)
    svc.set_prefill_batch([3])
    metadata = svc.prepare_prefill(full_index=True)
    buffer = torch.full((128 + 64, WIDTH), torch.nan, device=device)
    torch.ops.zos.swa_ring_load(view, metadata.swa_load_plan, buffer, 128)
    assert (buffer[:108].view(torch.int32) == 0).all()
    assert torch.isfinite(buffer[108:128]).all() and (buffer[108:128] != 0).any()
    assert metadata.kv_swa_index_offset_len[0].tolist() == [402, 21]
    back = store(torch.randn(4, WIDTH, device=device), metadata.swa_write_slot[:4].tolist(), view, cast_back=True)
    assert back is not None
    buffer[128:132] = back
    full = metadata.kv_swa_full_index
    assert full is not None
    seen = full[:4][full[:4] >= 0]
    assert torch.isfinite(buffer[seen]).all()


def test_strange_plans_read_nothing(device: str) -> None:
    """A plan that names no slot of this cache gives zeros, not somebody's memory."""
    view = cache(device)
    out = torch.full((8, WIDTH), 9.0, device=device)
    plan = torch.tensor([[[9, 0, 0, 4], [0, 133, 4, 3], [2, -5, 7, 1]]], dtype=torch.int32, device=device)
    torch.ops.zos.swa_ring_load(view, plan, out, 8)
    assert (out[:4] == 0).all() and (out[5:] == 0).all() and (out[4] != 0).all()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda v, s, c: (v.double(), s, c), "dtype of values"),
        (lambda v, s, c: (v[:, :500], s, c), "shape of values"),
        (lambda v, s, c: (v.t().contiguous().t(), s, c), "stride of values"),
        (lambda v, s, c: (v, s.int(), c), "dtype of write_slot"),
        (lambda v, s, c: (v, s[:1], c), "shape of write_slot"),
        (lambda v, s, c: (v, s, c.int()), "dtype of swa_cache"),
        (lambda v, s, c: (v, s, c[..., :500]), "shape of swa_cache"),
        (lambda v, s, c: (v, s, c[:, :, 0]), "shape of swa_cache"),
        (lambda v, s, c: (v, s, c.as_strided((4, RING, 1, ENTRY), (100, ENTRY, ENTRY, 1))), "stride of swa_cache"),
        (
            lambda v, s, c: (v, s, c.transpose(1, 3).contiguous().transpose(1, 3)),
            "stride of swa_cache: expected the bytes",
        ),
    ],
)
def test_bad_arguments(device: str, spoil: object, message: str) -> None:
    """Named before a byte is written."""
    view = cache(device)
    before = view.clone()
    arguments = (torch.ones(2, WIDTH, device=device), torch.zeros(2, dtype=torch.int64, device=device), view)
    with pytest.raises(ValueError, match=message):
        torch.ops.zos.swa_ring_store(*spoil(*arguments))  # type: ignore[operator]
    assert_bitwise_equal(view, before, "cache")


def test_bad_load_arguments(device: str) -> None:
    """A buffer too short for the plan, a plan of the wrong shape, no window."""
    view, out = cache(device), torch.zeros(256, WIDTH, device=device)
    plan = torch.zeros(3, 3, 4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="384 rows or more, got 256"):
        torch.ops.zos.swa_ring_load(view, plan, out, 128)
    with pytest.raises(ValueError, match="shape of load_plan"):
        torch.ops.zos.swa_ring_load(view, plan[:, :2].contiguous(), out, 64)
    with pytest.raises(ValueError, match="shape of load_plan"):
        torch.ops.zos.swa_ring_load(view, plan[0, 0, 0], out, 64)
    with pytest.raises(ValueError, match="window=0"):
        torch.ops.zos.swa_ring_load(view, plan, out, 0)


def test_opcheck(device: str) -> None:
    """Schema, fake implementation and functionalisation agree with what the operators do."""
    view = cache(device).contiguous()
    values, slots = torch.ones(2, WIDTH, device=device), torch.tensor([3, -1], device=device)
    torch.library.opcheck(torch.ops.zos.swa_ring_store.default, (values, slots, view, torch.zeros_like(values)))
    plan = torch.tensor([[[0, 3, 0, 1], [-1, 0, 1, 1], [-1, 0, 0, 0]]], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.zos.swa_ring_load.default, (view, plan, torch.zeros(2, WIDTH, device=device), 2))


def test_other_widths(device: str, seed: int) -> None:
    """Any latent width that is a multiple of 32: one below, one above what a warp takes in one round."""
    for width in (32, 96, 544, 1056):
        values = samples(seed, 64).reshape(-1)[: 8 * width].reshape(8, width).contiguous().to(device)
        entry = width + width // 32
        view = torch.zeros(1, RING, 1, entry, dtype=torch.uint8, device=device)
        store(values, list(range(8)), view)
        assert_bitwise_equal(view[0, :8, 0], reference_entries(values), f"entries of {width}")


def test_past_two_gib(device: str) -> None:
    """Entries beyond 2^31 bytes land where their state slot is: byte offsets are 64-bit."""
    pitch, states = 2**28, 12
    raw = torch.empty(pitch * (states - 1) + RING * ENTRY, dtype=torch.uint8, device=device)
    view = raw.as_strided((states, RING, 1, ENTRY), (pitch, ENTRY, ENTRY, 1))
    values = torch.full((1, WIDTH), 3.0, device=device)
    store(values, [11 * RING + 133], view)
    first = 11 * pitch + 133 * ENTRY
    assert first > 2**31
    assert_bitwise_equal(raw[first : first + ENTRY], reference_entries(values)[0], "entry")


def test_several_layers_at_once(device: str, seed: int) -> None:
    """One launch for all layers writes and reads what a launch a layer does, also layers that lie inside a state slot."""
    swa_cache = zos.SwaCache(zos.StateSlotLayout(stored_layers=3, dropped_layers=1), num_state_slots=4, device=device)
    single = zos.SwaCache(swa_cache.layout, num_state_slots=4, device=device)
    for slab in (swa_cache.slab, single.slab):
        slab.fill_(0x11)
    values = samples(seed, 3 * 40).reshape(3, 40, WIDTH).to(device)
    slots = torch.tensor([*range(2 * RING, 2 * RING + 38), -1, RING], device=device)
    backs = [torch.full_like(values, 77.0) for _ in range(2)]
    plan = torch.tensor([[[2, 0, 0, 30], [1, 0, 30, 1], [-1, 0, 31, 9]]], dtype=torch.int32, device=device)
    loaded = [torch.full((3, 50, WIDTH), 9.0, device=device) for _ in range(2)]
    layers = swa_cache.layers(1, 3)
    torch.ops.zos.swa_ring_store(values, slots, layers, backs[0])
    torch.ops.zos.swa_ring_load(layers, plan, loaded[0], 40)
    for layer in range(3):
        torch.ops.zos.swa_ring_store(values[layer], slots, single.layer(1 + layer), backs[1][layer])
        torch.ops.zos.swa_ring_load(single.layer(1 + layer), plan, loaded[1][layer], 40)
    assert_bitwise_equal(swa_cache.slab, single.slab, "slab")
    assert (swa_cache.layer(0) == 0x11).all() and not (swa_cache.layer(3)[2, :38] == 0x11).all()
    for name, (together, apart) in {"cast back": backs, "loaded": loaded}.items():
        assert_bitwise_equal(together.view(torch.int32), apart.view(torch.int32), name)
    with pytest.raises(ValueError, match=r"shape of swa_cache: expected \[3, S, R, 1, 528\]"):
        torch.ops.zos.swa_ring_store(values, slots, swa_cache.layers(0, 2), None)
    with pytest.raises(ValueError, match="stride of swa_cache: entries of 528 bytes overlap"):
        torch.ops.zos.swa_ring_store(values, slots, swa_cache.layer(0).expand(3, -1, -1, -1, -1), None)
    with pytest.raises(ValueError, match="ring=4"):
        swa_cache.layers(2, 3)
    many = torch.zeros(65_536 * 33, dtype=torch.uint8, device=device).view(65_536, 1, 1, 1, 33)
    with pytest.raises(ValueError, match="L = 65536 exceeds 65535"):
        torch.ops.zos.swa_ring_store(torch.zeros(65_536, 1, 32, device=device), slots[:1], many, None)


def test_segments_fill_rows_of_their_own_row_only(device: str, seed: int) -> None:
    """A plan whose destinations reach into another row's history, before the buffer or past it gives the same on both paths."""
    view = cache(device)
    values = samples(seed).to(device)
    store(values, list(range(64)), view)
    plan = torch.tensor(
        [[[0, 3, -4, 10], [0, 0, 6, 2**31 - 1], [-1, 0, 7, 1]], [[0, -2, 8, 8], [1, 0, 2**31 - 1, 5], [0, 2**31 - 1, 15, 1]]],
        dtype=torch.int32, device=device,
    )  # fmt: skip
    out = torch.full((16, WIDTH), 9.0, device=device)
    torch.ops.zos.swa_ring_load(view, plan, out, 8)
    plain = torch.tensor([[[0, 0, 0, 64], [-1, 0, 0, 0], [-1, 0, 0, 0]]], dtype=torch.int32, device=device)
    everything = torch.empty(64, WIDTH, device=device)
    torch.ops.zos.swa_ring_load(view, plain, everything, 64)
    row, zero = list(everything.cpu()), torch.zeros(WIDTH)
    expected = [*row[7:13], row[0], zero, zero, zero, *row[0:5], zero]
    assert_bitwise_equal(out.view(torch.int32), torch.stack(expected).view(torch.int32), "loaded")


def test_values_of_a_recording_model(device: str) -> None:
    """Values of a caller that forgot torch.no_grad are taken on both paths, not on the device's alone."""
    view, plain = cache(device), cache(device)
    values = torch.ones(2, WIDTH, device=device)
    store(values, [0, 1], plain)
    store(values.clone().requires_grad_(), [0, 1], view)
    assert_bitwise_equal(view, plain, "cache")
