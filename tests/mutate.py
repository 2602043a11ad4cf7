"""`make mutate`: changes ring.cuh and its Numba twin in one place at a time, and reports the changes that no test of them sees.

A mutant exchanges a comparison, a sign, min and max, a modulo, a connective or a shift, or moves a constant by one. It is killed
when a test of tests/test_ring.py fails, or when it does not build. EQUIVALENT lists those that change nothing, each with its proof.
Exit code 1 for any other survivor.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests import test_ring

ROOT = Path(__file__).parents[1]
RING_CUH, RING_PY = "device_kernels/ring.cuh", "host_fallback/ring.py"
SEED = 20261201
SKIPPED = re.compile(
    r"^\s*(//|#|@|\"\"\"|from|import|asm|enum|static_assert|constexpr int MAX|\w+,$)|TICKET_|_RANGE|Start|= \d,"
)
# (pattern of a token, what may stand in its place)
OPERATORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(?<![<\-])<=", ("<", "==")),
    (r"(?<![>\-])>=", (">", "==")),
    (r"==", ("!=",)),
    (r"!=", ("==",)),
    (r" < ", (" <= ", " > ")),
    (r" > ", (" >= ", " < ")),
    (r" \+ ", (" - ",)),
    (r" - ", (" + ",)),
    (r" % ", (" * ",)),
    (r" \* ", (" + ",)),
    (r" >> ", (" << ",)),
    (r" << ", (" >> ",)),
    (r" && ", (" || ",)),
    (r" \|\| ", (" && ",)),
    (r" and ", (" or ",)),
    (r" or ", (" and ",)),
    (r" & ", (" | ",)),
    (r" \| ", (" & ",)),
    (r"\bsmaller\(", ("larger(",)),
    (r"\blarger\(", ("smaller(",)),
    (r"\bmin\(", ("max(",)),
    (r"\bmax\(", ("min(",)),
    (r"(?<![\w.])(?:0x[0-9A-Fa-f]+|\d+)(?=u?\b(?![.\w]))", ("+1", "-1")),
)


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    file: str
    line: int  # from 1
    before: str  # the line, stripped
    after: str

    @property
    def name(self) -> str:
        """What EQUIVALENT lists it by: no line number, which moves."""
        return f"{Path(self.file).name}: {self.before} -> {self.after}"


_SAME = "equal sides: both are returned"
_ZERO = "a row of 0 tokens gets 0 either way"
_ENDED = "0 has returned above"
_NEVER_NEGATIVE = "snapshot_every is never negative: MetadataService takes 0 or more"
_LEAST_NORMAL = "both forms give code 8 at 2^-6, and at the float below it, which rounds to it"
_OVERRULED = "differs for seqlen_q <= 0 alone, where a later line overrules the error"
_BELOW_0 = "differs where prompt_end <= 0: then both are 0 or less, as window >= 1, and valid_start is 0 or more"
_HALF_OF_LEAST = "at 25 the significand, less than 2^24, is less than half of what is kept: code 0, as below"
# name of a mutant -> why nothing can tell it from the sound source
EQUIVALENT: dict[str, str] = {
    f"ring.cuh: {before} -> {after}": proof
    for before, after, proof in (
        (
            "ZOS_HD int smaller(int a, int b) { return a < b ? a : b; }",
            "ZOS_HD int smaller(int a, int b) { return a <= b ? a : b; }",
            _SAME,
        ),
        (
            "ZOS_HD int larger(int a, int b) { return a > b ? a : b; }",
            "ZOS_HD int larger(int a, int b) { return a >= b ? a : b; }",
            _SAME,
        ),
        *(
            (f"if (magnitude < 0x3C800000u) {rest}", f"if (magnitude {limit}) {rest}", _LEAST_NORMAL)
            for limit in ("<= 0x3C800000u", "< 0x3c800001u", "< 0x3c7fffffu")
            for rest in ("return sign | static_cast<int>(bits_of(float_of(magnitude) + 16384.0f) & 0xFu);",)
        ),
        (
            "return phase == LIVE && seqlen_q > 0 && seqlen_q <= limit ? seqlen_q : 0;",
            "return phase == LIVE && seqlen_q >= 0 && seqlen_q <= limit ? seqlen_q : 0;",
            _ZERO,
        ),
        (
            "if (q_start > INT32_LARGEST - larger(seqlen_q, 0)) error = POSITION_OVERFLOW;",
            "if (q_start > INT32_LARGEST - larger(seqlen_q, 1)) error = POSITION_OVERFLOW;",
            _OVERRULED,
        ),
        (
            "const int behind_skipped = begin > q_start ? begin : larger(prompt_end, 0) - window;",
            "const int behind_skipped = begin > q_start ? begin : larger(prompt_end, 1) - window;",
            _BELOW_0,
        ),
        ("if (snapshot_every <= 0) return -1;", "if (snapshot_every == 0) return -1;", _NEVER_NEGATIVE),
    )
} | {
    f"ring.py: {before} -> {after}": proof
    for before, after, proof in (
        (
            "return seqlen_q if phase == LIVE and 0 < seqlen_q <= limit else 0",
            "return seqlen_q if phase == LIVE and 0 <= seqlen_q <= limit else 0",
            _ZERO,
        ),
        ("if seqlen_q < 0:", "if seqlen_q <= 0:", _ENDED),
        ("if seqlen_q < 0:", "if seqlen_q < 1:", _ENDED),
        (
            "behind_skipped = begin if begin > q_start else max(prompt_end, 0) - window",
            "behind_skipped = begin if begin > q_start else max(prompt_end, 1) - window",
            _BELOW_0,
        ),
        ("if snapshot_every <= 0:", "if snapshot_every == 0:", _NEVER_NEGATIVE),
        ("if magnitude < 0x3C800000:", "if magnitude <= 0x3C800000:", _LEAST_NORMAL),
        ("if magnitude < 0x3C800000:", "if magnitude < 0x3c800001:", _LEAST_NORMAL),
        ("if magnitude < 0x3C800000:", "if magnitude < 0x3c7fffff:", _LEAST_NORMAL),
        ("if shift > 24:", "if shift > 25:", _HALF_OF_LEAST),
    )
}


def mutants(file: str) -> Iterator[Mutant]:
    """Every mutant of a source file, in the order of its lines."""
    inside = device = False  # a docstring; what only a device compiles, which its parity tests hold against the host's
    for number, line in enumerate((ROOT / file).read_text().splitlines(), 1):
        device = line.startswith("#ifdef __CUDA_ARCH__") or (device and line.strip() not in ("#else", "#endif"))
        if '"""' in line:
            inside = not inside if line.count('"""') == 1 else inside
            continue
        code = line.partition("//" if file == RING_CUH else "  #")[0]
        if inside or device or SKIPPED.search(code) or not code.strip():
            continue
        for pattern, replacements in OPERATORS:
            for found in re.finditer(pattern, code):
                for replacement in replacements:
                    new = replacement
                    if replacement in ("+1", "-1") and found[0][0].isdigit():
                        value = int(found[0], 0) + int(replacement)
                        if value < 0:
                            continue
                        new = hex(value) if found[0].startswith("0x") else str(value)
                    after = code[: found.start()] + new + code[found.end() :]
                    yield Mutant(file, number, code.strip(), after.strip())


def mutated(mutant: Mutant) -> str:
    """The whole source with the change."""
    lines = (ROOT / mutant.file).read_text().splitlines(keepends=True)
    line = lines[mutant.line - 1]
    lines[mutant.line - 1] = line[: len(line) - len(line.lstrip())] + mutant.after + "\n"
    return "".join(lines)


def killer(mutant: Mutant) -> str | None:
    """Name of the test that fails on the mutant, or what else ends it; None: it survives."""
    if mutant.file == RING_PY:
        return _killer_of_twin(mutant)
    with tempfile.TemporaryDirectory() as folder:
        return _killer_of_header(mutant, Path(folder))


def _killer_of_header(mutant: Mutant, folder: Path) -> str | None:
    (folder / "ring.cuh").write_text(mutated(mutant))
    try:
        harness = test_ring.build(folder, folder)
    except subprocess.CalledProcessError:
        return "does not compile"
    checks: list[Callable[[], None]] = [
        lambda: test_ring.test_ring_cuh(harness, SEED),
        lambda: test_ring.test_entry_numbers(harness, SEED),
        lambda: test_ring.test_scales_round_up(harness, SEED),
        lambda: test_ring.test_division_is_exact(harness),
        lambda: test_ring.test_launcher_packs_the_same_divisor(harness, SEED),
    ]
    return _first_failure(checks)


@cache
def _sound_harness() -> Path:
    return test_ring.build(test_ring.SOURCES, Path(tempfile.mkdtemp(prefix="zos-mutate-")))


def _killer_of_twin(mutant: Mutant) -> str | None:
    source = mutated(mutant).replace("from numba import njit", "njit = lambda **options: lambda function: function")
    module = types.ModuleType("mutant")
    sound, harness = test_ring.twin, _sound_harness()
    try:
        exec(compile(source, mutant.file, "exec"), module.__dict__)
    except (SyntaxError, ValueError):
        return "does not load"
    try:
        test_ring.twin = module
        names = [lambda name=name: test_ring.test_numba_twin(name, SEED) for name in test_ring.TWINS]
        return _first_failure(
            [
                *names,
                test_ring.test_twins_have_the_same_names_and_codes,
                lambda: test_ring.test_entry_numbers(harness, SEED),
                lambda: test_ring.test_scales_round_up(harness, SEED),
            ]
        )
    finally:
        test_ring.twin = sound


def _first_failure(checks: list[Callable[[], None]]) -> str | None:
    for check in checks:
        try:
            check()
        except (AssertionError, ArithmeticError, ValueError, TypeError) as error:
            return type(error).__name__
    return None


def report(found: list[tuple[Mutant, str | None]], seconds: float) -> dict[str, object]:
    """Figures of a run, and the survivors that nothing explains."""
    survivors = [mutant for mutant, by in found if by is None]
    unexplained = [mutant for mutant in survivors if mutant.name not in EQUIVALENT]
    return {
        "mutants": len(found),
        "killed": len(found) - len(survivors),
        "equivalent": len(survivors) - len(unexplained),
        "survivors": [f"{mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}" for mutant in unexplained],
        "seconds": round(seconds, 1),
    }


def main(argv: list[str] | None = None) -> int:
    """Run all mutants, or those of some lines."""
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", metavar="TEXT", default="", help="only mutants whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    every = {m.name for file in (RING_CUH, RING_PY) for m in mutants(file)}
    if unknown := sorted(set(EQUIVALENT) - every):
        raise SystemExit(f"EQUIVALENT lists what is no mutant: {unknown}")
    chosen = [m for file in (RING_CUH, RING_PY) for m in mutants(file) if arguments.only in m.name]
    begin = time.monotonic()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        killers = list(pool.map(killer, chosen, chunksize=4))
    figures = report(list(zip(chosen, killers, strict=True)), time.monotonic() - begin)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if figures["survivors"] else 0


if __name__ == "__main__":
    sys.exit(main())
