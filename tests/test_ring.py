"""Test that ring.cuh, built by g++ with sanitizers, and its Numba twin compute what plain Python formulas say."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import host_fallback.ring as twin
from device_kernels import module

SOURCES = Path(module.__file__).parent
LARGEST = 2**31 - 1
LIVE = 1

# Each function in plain Python, written from docs/design.md.
FORMULAS: dict[str, Callable[..., int]] = {
    "quotient": lambda n, d: n // d,
    "remainder": lambda n, d: n % d,
    "window_begin": lambda position, window, valid: max(position - window + 1, valid, 0),
    "ring_slot": lambda position, ring: position % ring,
    "ring_advance": lambda slot, steps, ring: (slot + steps) % ring,
    "history_start": lambda begin, q_start, window: min(begin, q_start) - (q_start - window),
    "chunk_start": lambda begin, q_start: max(0, begin - q_start),
    "compressed_index": lambda p, ratio, cached: p // ratio if (p + 1) % ratio == 0 and p >= cached else -1,
    "history_padding": lambda start, valid, window: sum(p < max(valid, 0) for p in range(start - window, start)),
    "overwritten": lambda j, q, slots: int(any((j - later) % slots == 0 for later in range(j + 1, q))),
    "tail_begin": lambda start, q, end, window, step: (
        start if start >= end and q <= step else max(start, (end if start < end else start + q) - window)
    ),
    "tail_valid_start": lambda valid, start, q, end, window, step: max(
        valid, start + q - window if start >= end and q > max(window, step) else end - window
    ),
    "row_places": lambda phase, q, limit: q if phase == LIVE and 1 <= q <= limit else 0,
    "row_error": lambda phase, q, start, prompt_end, valid, limit: expected_error(
        phase, q, start, prompt_end, valid, limit
    ),
    "row_error_value": lambda error, q, start, valid: {1: q, 6: q, 3: valid, 4: valid}.get(error, start),
    "kept_error": lambda kept, q, step: (8 if kept != q else 0) if q > step else (0 if 0 <= kept <= q else 7),
    "kept_before_stop": lambda kept, start, stop: max(0, min(kept, stop - start)) if stop > 0 else kept,
    "until_boundary": lambda start, every: next(n for n in range(1, every + 1) if (start + n) % every == 0),
    "next_seqlen_q": lambda start, end, chunk, decode, step, most, every: (
        min(chunk or most, end - start, *([every - start % every] if every else [])) if start < end else decode or step
    ),
    "snapshot_boundary": lambda before, after, head, valid, window, ring, every: expected_boundary(
        before, after, head, valid, window, ring, every
    ),
}


def expected_boundary(before: int, after: int, head: int, valid: int, window: int, ring: int, every: int) -> int:
    """The last boundary that was come to, if the window before it is all in the ring: not missing, not overwritten."""
    boundary = max((b for b in range(max(before, 0) + 1, after + 1) if every and b % every == 0), default=-1)
    whole = max(boundary - window + 1, 0) >= valid and boundary - window >= head - ring
    return boundary if whole else -1


def expected_error(phase: int, q: int, start: int, prompt_end: int, valid: int, limit: int) -> int:
    """The row rules of docs/design.md in their order; the numbers are ErrorCode's."""
    if phase != LIVE or q == 0 or (start < prompt_end and q > limit):
        return 0
    rules = (
        (not 0 <= q <= limit, 1),
        (start < 0, 2),
        (valid < 0, 3),
        (valid > start, 4),
        (start + q > LARGEST, 5),
        (start < prompt_end and start + q > prompt_end, 6),
    )
    return next((code for broken, code in rules if broken), 0)


def cases(name: str, rng: random.Random) -> tuple[int, ...]:
    """Random arguments within what the function's callers give it, edges often."""
    window, ratio = rng.choice((1, 2, 7, 128, 4096)), rng.choice((1, 2, 3, 4, 128, 1024))
    ring = window + rng.randrange(20)
    edges = (0, 1, window - 1, window, ring, 3 * ring, 2**31 - 8, LARGEST - 1, rng.randrange(LARGEST))
    position = min(LARGEST - 1, max(0, rng.choice(edges) + rng.randrange(-2, 3)))
    any_int = rng.choice((0, 1, -1, LARGEST, -(2**31), rng.randrange(-(2**31), 2**31)))
    valid = rng.choice((0, position, rng.randrange(position + 1)))
    step, q = rng.randrange(1, 18), rng.randrange(-2, 20)
    every = rng.choice((0, 1, 7, 128, 512, rng.randrange(1, 40)))
    q_start = max(0, position - rng.randrange(8))
    begin = max(position - window + 1, min(valid, q_start), 0)
    divisor = rng.choice(
        (1, 2, 3, 134, 7, LARGEST, 2**30, 2**30 + 1, rng.randrange(1, LARGEST), rng.randrange(1, 5000))
    )
    length = min(rng.choice((1, step, step + 1, window, window + 1, 2 * window)), LARGEST - position)
    prompt_end = rng.choice(
        (0, position, min(LARGEST, position + length), min(LARGEST, position + 5 * window), LARGEST)
    )
    return {
        "tail_begin": (position, length, rng.choice((prompt_end, -(2**31))), window, step),
        "tail_valid_start": (valid, position, length, rng.choice((prompt_end, -(2**31))), window, step),
        "quotient": (rng.choice((position, LARGEST, max(0, divisor * rng.randrange(1, 9) % LARGEST - 1))), divisor),
        "remainder": (rng.choice((position, LARGEST)), divisor),
        "window_begin": (position, window, valid),
        "ring_slot": (position, ring),
        "ring_advance": (rng.randrange(ring), rng.randrange(ring), ring),
        "history_start": (begin, q_start, window),
        "chunk_start": (begin, q_start),
        "compressed_index": (position, ratio, rng.choice((0, position, position + 1, valid))),
        "history_padding": (position, valid, window),
        "overwritten": (j := rng.randrange(40), j + rng.randrange(1, 60), rng.randrange(1, 50)),
        "row_places": (rng.randrange(5), rng.choice((q, any_int)), step),
        "row_error": (
            rng.choice((LIVE, LIVE, LIVE, rng.randrange(5))),
            rng.choice((q, q, any_int)),
            rng.choice((position, any_int)),
            rng.choice((0, position + 1, max(0, position - 1), max(0, any_int))),
            rng.choice((valid, any_int)),
            step,
        ),
        "row_error_value": (rng.randrange(9), q, any_int, valid),
        "kept_error": (rng.choice((q, any_int)), rng.choice((max(q, 1), 300)), step),
        "kept_before_stop": (rng.randrange(1, 7), position, rng.choice((0, position, min(LARGEST, position + 3), max(0, any_int)))),
        "next_seqlen_q": (
            position, rng.choice((0, position, min(LARGEST, position + 9), LARGEST)),
            rng.choice((0, 1, 5)), rng.choice((0, 1, 2)), step, 64, every,
        ),
        "until_boundary": (position, every or 1),
        "snapshot_boundary": (
            q_start, min(LARGEST, q_start + rng.choice((1, step, rng.randrange(1, 300)))),
            min(LARGEST, position + rng.choice((0, step, ring - window, rng.randrange(300)))),
            rng.choice((valid, 1, max(0, position - window + rng.randrange(-2, 3)))), window, ring, every,
        ),
    }[name]  # fmt: skip


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ring.cuh in a program built by g++ with the address and undefined-behaviour sanitizers."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return build(SOURCES, tmp_path_factory.mktemp("ring"))


def build(sources: Path, folder: Path) -> Path:
    """Build the program in a folder, with the ring.cuh of another."""
    binary = folder / "harness"
    flags = [
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=undefined,address",
        "-fno-sanitize-recover=all",
    ]
    source = Path(__file__).parent / "ring_cuh_harness.cpp"
    subprocess.run(["g++", *flags, f"-I{sources}", str(source), "-o", str(binary)], check=True, stderr=subprocess.PIPE)
    return binary


def ask(harness: Path, questions: list[tuple[str, tuple[int, ...]]]) -> list[int]:
    """Answers of the C++ functions."""
    lines = "".join(f"{name} {' '.join(map(str, values))}\n" for name, values in questions)
    found = subprocess.run([harness], input=lines, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return [int(line) for line in found.stdout.split()]


def test_ring_cuh(harness: Path, seed: int) -> None:
    """Edge and random values of every function; a sanitizer finding ends the program."""
    questions, answers = zip(*questions_with_answers(seed), strict=True)
    for (name, values), expected, answer in zip(questions, answers, ask(harness, list(questions)), strict=True):
        assert answer == expected, f"{name}{values}"


@cache
def questions_with_answers(seed: int) -> list[tuple[tuple[str, tuple[int, ...]], int]]:
    """Calls of every function, and what each must give; kept for tests/mutate.py, which asks them of many variants."""
    rng = random.Random(seed)
    questions = [(name, cases(name, rng)) for name in FORMULAS for _ in range(4000)]
    return [((name, values), FORMULAS[name](*values)) for name, values in questions]


def test_division_is_exact(harness: Path) -> None:
    """Each divisor up to 4,200 and the largest, at multiples and their neighbours: where a short multiplier would be off by one."""
    questions = []
    for divisor in [*range(1, 4200), *range(LARGEST - 3, LARGEST + 1), 2**30 - 1, 2**30, 2**30 + 1]:
        most = LARGEST // divisor * divisor
        for dividend in {0, divisor - 1, divisor, most - 1, most, LARGEST}:
            if 0 <= dividend <= LARGEST:
                questions.append(("quotient", (dividend, divisor)))
    for (_, (dividend, divisor)), answer in zip(questions, ask(harness, questions), strict=True):
        assert answer == dividend // divisor, f"{dividend} // {divisor}"


def test_launcher_packs_the_same_divisor(harness: Path, seed: int) -> None:
    """The multiplier that Python packs for the kernel is the one that ring.cuh makes."""
    rng = random.Random(seed)
    divisors = [1, 2, 3, 134, 2**30, 2**30 + 1, LARGEST, *(rng.randrange(1, LARGEST) for _ in range(500))]
    answers = ask(harness, [(part, (divisor,)) for divisor in divisors for part in ("multiplier", "shift")])
    for divisor, multiplier, shift in zip(divisors, answers[::2], answers[1::2], strict=True):
        assert module.divisor(divisor) == (divisor, multiplier % 2**32, shift)


TWINS = sorted(set(FORMULAS) - {"quotient", "remainder", "ring_advance"})


@pytest.mark.parametrize("name", TWINS)
def test_numba_twin(name: str, seed: int) -> None:
    """The Numba function of the same name gives the same values."""
    function = getattr(twin, name)
    for (asked, values), expected in questions_with_answers(seed):
        if asked == name:
            assert function(*values) == expected, f"{name}{values}"


def test_twins_have_the_same_names_and_codes() -> None:
    """Phases and error codes are the same numbers everywhere."""
    import zos

    source = (SOURCES / "ring.cuh").read_text()
    for code in [*zos.Phase, *zos.ErrorCode]:
        assert re.search(rf"\b{code.name} = {code.value}\b", source), code
        assert getattr(twin, code.name) == code.value
    assert (255, 0x7F, zos.EntryFormat.mxfp8().scale_block) == (twin.E8M0_NAN, twin.E4M3_NAN, twin.SCALE_BLOCK)


def float_bits(value: float) -> int:
    """The fp32 bits of a value."""
    return int(np.float32(value).view(np.uint32))


def test_entry_numbers(harness: Path, seed: int) -> None:
    """MXFP8 in plain C++ against torch's float8 and exact powers of two: all bytes, and roundings at and beside every tie."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    rng = np.random.default_rng(seed)
    several = [codes, ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(999.0))]
    several += [
        torch.from_numpy((rng.standard_normal(2000) * 2.0 ** rng.integers(-20, 8, 2000)).astype(np.float32)).clamp(
            -448, 448
        )
    ]
    several += [torch.tensor([2.0**-149, 2.0**-127, 2.0**-10, 2.0**-11, 0.0])]
    values = torch.cat(several)
    values = torch.cat([values, -values])
    expected = values.to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    bits = [float_bits(value) for value in values.tolist()]
    assert ask(harness, [("e4m3_round", (b,)) for b in bits]) == expected
    assert [twin.e4m3_round(b) for b in bits] == expected

    loaded = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    found = (
        np.array(ask(harness, [("e4m3_value", (byte,)) for byte in range(256)]), np.int64)
        .astype(np.uint32)
        .view(np.float32)
    )
    assert np.array_equal(found, loaded.numpy(), equal_nan=True)
    assert [hex(bits) for bits in found[[127, 255]].view(np.uint32)] == ["0x7fc00000", "0xffc00000"]
    scales = (
        np.array(ask(harness, [("e8m0_value", (byte,)) for byte in range(256)]), np.int64)
        .astype(np.uint32)
        .view(np.float32)
    )
    assert [float(scale) for scale in scales[:255]] == [2.0 ** (byte - 127) for byte in range(255)]
    assert hex(scales[255:].view(np.uint32)[0]) == "0x7fc00000"
    inverses = np.array(ask(harness, [("e8m0_inverse", (byte,)) for byte in range(248)]), np.int64).astype(np.uint32)
    assert [float(inverse) for inverse in inverses.view(np.float32)] == [2.0 ** (127 - byte) for byte in range(248)]


def test_scales_round_up(harness: Path, seed: int) -> None:
    """The smallest power of two with amax / 2^e <= 448, at and beside every limit; NaN and infinity have their own byte."""
    rng = np.random.default_rng(seed)
    limits = [448 * 2.0**e for e in range(-149, 120)]
    values = np.array([*limits, *(2.0 ** rng.uniform(-149, 127, 3000)), 0.0, 2.0**-149], np.float32)
    values = np.concatenate([values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))])
    values = values[np.isfinite(values)]
    found = ask(harness, [("e8m0_round_up", (float_bits(value),)) for value in values])
    for value, byte in zip(values.astype(np.float64), found, strict=True):
        assert value <= 448 * 2.0 ** (byte - 127), value
        assert byte == 0 or value > 448 * 2.0 ** (byte - 128), value
    assert [twin.e8m0_round_up(float_bits(value)) for value in values] == found
    endless = [float_bits(value) for value in (np.inf, np.nan)]
    assert ask(harness, [("e8m0_round_up", (bits,)) for bits in endless]) == [255, 255]
    assert [twin.e8m0_round_up(bits) for bits in endless] == [255, 255]
