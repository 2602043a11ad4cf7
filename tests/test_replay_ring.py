"""Test that a replay's ring is judged right: latents alike on both sides, entries by another quantiser, faults found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.reference import assert_bitwise_equal
from tests.replays import mooncake_trace, replay_figures
from zos.cli.dense_ring import DenseRing, dequantised, quantised
from zos.cli.latents import MAGNITUDES, Latents
from zos.cli.replay_ring import ReplayRing

REQUESTS = [(0, 300, 40), (0, 90, 60), (0, 0, 30), (30, 700, 20, [1, 2]), (200, 900, 20, [1, 2])]
OPTIONS = ("--device=cpu", "--chunk=200", "--max-prefill-tokens=300", "--ring")


def random_tokens(seed: int, count: int) -> tuple[np.ndarray, ...]:
    """state_id, generation, position, rejected."""
    rng = np.random.default_rng(seed)
    numbers = [rng.integers(0, most, count) for most in (65_536, 10_000, 2**31)]
    return (*numbers, rng.random(count) < 0.3)


# ---- latents ----------------------------------------------------------------------------------------------------


def latent_in_plain_python(state_id: int, generation: int, position: int, rejected: int) -> list[float]:
    """The latent from its description: splitmix64's finaliser, then a product of 32-bit words for each value and block."""

    def mixed(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    def drawn(number: int, bits: int) -> int:
        """High bits of a product as a signed number."""
        top = token * (mixed(number) >> 32 | 1) % 2**32 >> 32 - bits
        return top - 2**bits * (top >= 2 ** (bits - 1))

    token = mixed(mixed(state_id << 32 ^ generation) ^ (position << 1 | rejected)) >> 32
    magnitudes = [MAGNITUDES[drawn(513 + block, 4) + 8] for block in range(16)]
    return [drawn(1 + i, 9) * magnitudes[i // 32] for i in range(512)]


def test_latents_are_alike_everywhere(device: str, seed: int) -> None:
    """One bit of difference between torch and NumPy, and the dense model would judge another sequence."""
    tokens = random_tokens(seed, 300)
    latents = Latents(device)
    on_device = latents.on_device(*(torch.from_numpy(column).to(device) for column in tokens))
    on_host = latents.on_host(*tokens)
    assert on_device.dtype == torch.bfloat16 and on_host.dtype == np.float32
    assert_bitwise_equal(on_device.float().cpu().view(torch.int32), on_host.view(np.int32), "latents")
    for token, latent in zip(np.stack(tokens, 1)[:20].tolist(), on_host, strict=False):
        assert latent.tolist() == latent_in_plain_python(*token)


def test_latents_differ(seed: int) -> None:
    """Neighbours in state, generation and position, and a token kept or rejected, have different entries and many scales."""
    tokens = random_tokens(seed, 200)
    model = DenseRing(1, 1)
    entries = model.entries(*tokens)
    for column in range(4):
        others = [other.copy() for other in tokens]
        others[column] = ~others[column] if column == 3 else others[column] + 1
        assert (model.entries(*others) != entries).any(axis=1).all()
    assert len(np.unique(entries, axis=0)) == len(entries)
    assert len(np.unique(entries[:, 512:])) > 16, "scales are all alike"
    assert (entries[:, 512:] == 0).any() and (entries[:, :512] != 0).any(axis=1).all()


# ---- quantiser --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amax", "scale", "element"),
    [
        (448.0, 127, 0x7E),
        (449.0, 128, 0x76),
        (1.0, 119, 0x78),
        (2.0**-133, 0, 0x08),
        (0.0, 0, 0),
        (2.0**127, 246, 0x78),
    ],
)
def test_quantised_by_hand(amax: float, scale: int, element: int) -> None:
    """The dense model's own rule: the smallest power of two that does not saturate, but never below 2^-127."""
    values = np.zeros((1, 512), np.float32)
    values[0, 40] = amax
    entry = quantised(values)[0]
    assert (entry[512 + 1], entry[40], entry[512]) == (scale, element, 0)


def test_quantiser_agrees_with_the_operators(device: str, seed: int) -> None:
    """Another code, the same bytes; and what a load gives back, down to the sign of a zero."""
    tokens = random_tokens(seed, 134)
    latents = Latents(device).on_device(*(torch.from_numpy(column).to(device) for column in tokens))
    ring = torch.zeros(1, 134, 1, 528, dtype=torch.uint8, device=device)
    torch.ops.zos.swa_ring_store(latents, torch.arange(134, device=device), ring)
    expected = DenseRing(1, 1).entries(*tokens)
    assert_bitwise_equal(ring[0, :, 0], expected, "entries")
    plan = torch.tensor([[[0, 0, 0, 134], [-1, 0, 0, 0], [-1, 0, 0, 0]]], dtype=torch.int32, device=device)
    loaded = torch.full_like(latents, torch.nan)
    torch.ops.zos.swa_ring_load(ring, plan, loaded, 134)
    assert_bitwise_equal(loaded.view(torch.int16), dequantised(expected), "loaded")


def test_dense_windows(seed: int) -> None:
    """Positions below the start are zeros, a state's next tenant shares nothing, and remembered entries equal fresh ones."""
    rng = np.random.default_rng(seed)
    window, dense = 16, DenseRing(4, 16)
    for _ in range(30):
        state = rng.permutation(4)[:3]
        generation, end = rng.integers(1, 3, 3), rng.integers(0, 60, 3)
        start = np.maximum(0, end - rng.integers(0, 40, 3))
        entries, positions = dense.windows(state, generation, start, end)
        for row in range(3):
            for k in range(window):
                position = int(end[row]) - window + k
                if position < start[row]:
                    assert positions[row, k] == -1 and not entries[row, k].any()
                else:
                    token = (state[row : row + 1], generation[row : row + 1], np.array([position]), np.array([False]))
                    assert positions[row, k] == position
                    assert (entries[row, k] == dense.entries(*token)[0]).all()


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize("prompt", [0, 500])
def test_ring_replays_without_a_mismatch(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, prompt: int
) -> None:
    """--ring alone prefills, as a prompt that only counts as prefilled has no entries; sequences outgrow ring and window."""
    trace = mooncake_trace(tmp_path, [(0, prompt, 300), (0, prompt // 2, 90), (60, prompt, 200)])
    found = replay_figures(tmp_path, trace, "--device", device, "--layout", layout, "--ring")
    assert found["mismatches"] == 0
    assert found["prefill"]["prompt_tokens_prefilled"] == 2 * prompt + prompt // 2
    assert found["ring_entries_compared"] > 20_000
    assert f"ring entries compared       {found['ring_entries_compared']}" in capsys.readouterr().out


def test_nothing_is_stored_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --ring there is no slab and no latent."""
    monkeypatch.setattr(ReplayRing, "__init__", None)
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, REQUESTS), *OPTIONS[:-1])
    assert (found["mismatches"], found["ring_entries_compared"]) == (0, None)


# ---- faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("every", [1, 4])
def test_skipped_store_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, every: int) -> None:
    """A step that stores nothing leaves the ring wrong for a window: found at once, and also where steps are skipped."""
    step, calls = getattr(ReplayRing, kind), [0]

    def faulty(self: ReplayRing, metadata: Any, *rest: Any) -> None:
        calls[0] += int(metadata.num_tokens) > 0  # not the warm-up's
        if calls[0] == 2:
            slots = metadata.swa_write_slot.clone()
            metadata.swa_write_slot.fill_(-1)
            step(self, metadata, *rest)
            metadata.swa_write_slot.copy_(slots)
        else:
            step(self, metadata, *rest)

    monkeypatch.setattr(ReplayRing, kind, faulty)
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, REQUESTS), *OPTIONS, f"--check={every}", code=1)
    assert all("against the dense model" in example for example in found["mismatch_examples"])
    assert any(": ring against" in example for example in found["mismatch_examples"])


def test_skipped_load_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of history that was not written is poison, where the buffer may have held the right one before: zeros here."""
    prefill = ReplayRing.prefill

    def faulty(self: ReplayRing, metadata: Any) -> None:
        metadata.swa_load_plan[0, 0, 3] -= 1  # the only segment's last row
        prefill(self, metadata)
        metadata.swa_load_plan[0, 0, 3] += 1

    def load(swa_cache: torch.Tensor, load_plan: torch.Tensor, out: torch.Tensor, window: int) -> None:
        rows = int(load_plan[0, 0, 3])  # unlike the operator, which writes all rows whatever a plan says
        out[:rows] = 0

    monkeypatch.setattr(torch.ops.zos, "swa_ring_load", load)
    monkeypatch.setattr(ReplayRing, "prefill", faulty)
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, [(0, 90, 1)]), *OPTIONS, code=1)
    assert [example.split(": ", 1)[1] for example in found["mismatch_examples"]] == [
        "history against the dense model: 512 of 65536 differ, first at [0, 127, 0]: 32704, expected 0"
    ]


def test_rejected_draft_taken_for_kept_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a rejected draft leaves in the ring differs: seen by those that gather it in its own step."""
    decode, calls = ReplayRing.decode, [0]

    def faulty(self: ReplayRing, metadata: Any, num_kept: torch.Tensor) -> None:
        calls[0] += 1
        decode(self, metadata, metadata.seqlens_q if calls[0] == 5 else num_kept)

    monkeypatch.setattr(ReplayRing, "decode", faulty)
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, REQUESTS), *OPTIONS, "--acceptance=0.3", code=1)
    (example,) = found["mismatch_examples"]
    assert ": rows gathered through kv_swa_index against the dense model" in example


@pytest.mark.parametrize("name", ["history", "own tokens"])
def test_one_wrong_value_that_queries_see_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A single value of a single row, history or the chunk's own."""
    prefill, calls = ReplayRing.prefill, [0]

    def faulty(self: ReplayRing, metadata: Any) -> None:
        prefill(self, metadata)
        calls[0] += int(metadata.num_tokens) > 0
        if calls[0] == 3:
            first = metadata.batch * 128 if name == "own tokens" else 5
            self.buffer[first, 7] = 3.0e38

    monkeypatch.setattr(ReplayRing, "prefill", faulty)
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, REQUESTS), *OPTIONS, code=1)
    (example,) = found["mismatch_examples"]
    assert f": {name} against the dense model: 1 of" in example


def test_wrong_byte_in_the_ring_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one entry's scale: in the window, and in what the next steps gather; every byte of an entry counts."""
    decode, calls = ReplayRing.decode, [0]

    def faulty(self: ReplayRing, metadata: Any, num_kept: torch.Tensor) -> None:
        decode(self, metadata, num_kept)
        calls[0] += 1
        if calls[0] == 4:
            state, slot = divmod(int(metadata.swa_write_slot[0]), 134)
            self.layer[state, slot, 0, 527] ^= 1

    monkeypatch.setattr(ReplayRing, "decode", faulty)
    found = replay_figures(tmp_path, mooncake_trace(tmp_path, REQUESTS), *OPTIONS, code=1)
    examples = " ".join(found["mismatch_examples"])
    assert ": ring against the dense model: 1 of" in examples
    assert ": rows gathered through kv_swa_index against the dense model" in examples
