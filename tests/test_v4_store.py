"""Test that a model goes on from a stored state, in another service with other memory, as the run that stored it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import zos
from tests.v4 import SMALL, tiny_model
from zos.v4.dense import dense_forward
from zos.v4.model import V4Model, input_ids
from zos.v4.speculative import SpeculativeStep
from zos.v4.state import V4State
from zos.v4.step import PrefillStep

EVERY, BOUNDARY, PROMPT, TOKENS = 16, 48, 61, 30
NAN_BYTE = 0xFF
STATES = 3
KEY = "a prefix"


class Run:
    """A model with memory of its own, full of NaN."""

    def __init__(self, model: V4Model, ids: torch.Tensor) -> None:
        config, device = model.config, ids.device
        self.model = model
        self.svc = zos.MetadataService(
            STATES, 1, config.geometry, device, 64, "strided", config.compression_rings(), carry_tokens=True,
            snapshot_every=EVERY,
        )  # fmt: skip
        self.state = V4State(config, STATES, PROMPT + TOKENS, device)
        self.state.cache.slab.fill_(NAN_BYTE)
        for entries in self.state.compressed.values():
            entries.fill_(torch.nan)
        for state_id in range(STATES):
            self.state.set_prompt(state_id, ids)

    def prefill_step(self, state_id: int, restored_end: torch.Tensor | None = None) -> None:
        """Run the state's next chunk."""
        self.svc.set_prefill_batch([state_id])
        md = self.svc.prepare_prefill()
        step = PrefillStep(self.model.config, self.state, md, restored_end)
        hidden = self.model(input_ids(md, self.state, self.svc.table.prompt_end), step)
        tokens = torch.zeros(1, self.svc.geometry.tokens_per_step, dtype=torch.int64, device=hidden.device)
        tokens[:, 0] = self.model.logits(hidden[step.last_token_index]).argmax(-1)
        self.svc.commit(md, md.seqlens_q, None, tokens)

    def q_start(self, state_id: int) -> int:
        """Where the state stands."""
        return int(self.svc.table.q_start[state_id])

    def finish(self, state_id: int, restored_end: torch.Tensor | None = None) -> list[int]:
        """Run the rest of the prompt, then generate to the end; returns the tokens."""
        while self.q_start(state_id) < PROMPT:
            self.prefill_step(state_id, restored_end)
        loop = zos.DecodeLoop(
            self.svc, SpeculativeStep(self.model, self.state, self.svc), buckets=[1], kept_tokens=True
        )
        loop.set_batch([state_id])
        tokens: list[int] = []
        while len(tokens) < TOKENS:
            loop.run()
            for record in loop.drain():
                if not record.prefill:
                    assert record.kept_tokens is not None
                    tokens += record.kept_tokens[0, : record.kept[0]].tolist()
        self.svc.check()
        return tokens

    def admission(self) -> dict[str, int]:
        """Arguments that every admission of the prompt has."""
        return {"prompt_end": PROMPT, "chunk_q": SMALL.window, "decode_q": 1, "stop_at": PROMPT + TOKENS}

    def entries_below_boundary(self) -> dict[int, slice]:
        """By compressing layer: its entries of tokens below the boundary."""
        return {layer: slice(BOUNDARY // self.model.config.ratios[layer]) for layer in self.state.compressed}


def stored_run(model: V4Model, ids: torch.Tensor, folder: Path) -> tuple[Run, list[int]]:
    """Run the prompt from its start, storing the snapshot that is taken at the boundary on the way; returns its tokens too."""
    run = Run(model, ids)
    pool = zos.SnapshotPool(run.svc, run.state.cache, num_snapshots=BOUNDARY // EVERY)
    run.svc.attach_snapshots(pool)
    store = zos.LocalStateStore(run.svc, run.state.cache, folder)
    run.svc.admit(0, **run.admission())
    while run.q_start(0) < BOUNDARY:  # waits for the device, so what it has taken is seen
        run.prefill_step(0)
    for snapshot in sorted(pool.poll(), key=lambda snapshot: snapshot.boundary):  # the last one stays
        store.put_bytes(KEY, snapshot.boundary, snapshot.head, pool.read(snapshot))
        pool.free(snapshot)
    assert run.q_start(0) == BOUNDARY and store.contains(KEY) and pool.skipped == 0
    return run, run.finish(0)


def restored_run(model: V4Model, ids: torch.Tensor, folder: Path, first: Run, rebuild: bool) -> tuple[Run, int]:
    """A run whose state 1 comes from the store, and the compressed entries below the boundary from a prefix cache."""
    run = Run(model, ids)
    for layer, entries in run.entries_below_boundary().items():
        run.state.compressed[layer][1, entries] = first.state.compressed[layer][0, entries]
    store = zos.LocalStateStore(run.svc, run.state.cache, folder)
    state_id = store.get(KEY, 1, rebuild_dropped=rebuild, **run.admission())
    run.svc.flush()
    return run, state_id


def test_without_dropped_rings(device: str, tmp_path: Path, seed: int) -> None:
    """Every ring is stored: the tokens are those of the run that was not interrupted, and of the dense twin."""
    model = tiny_model(device, seed, SMALL, producers=4)
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, PROMPT)).to(device)
    first, expected = stored_run(model, ids, tmp_path)
    run, state_id = restored_run(model, ids, tmp_path, first, rebuild=False)
    assert run.q_start(state_id) == BOUNDARY
    assert run.finish(state_id) == expected
    whole = torch.cat([ids, torch.tensor(expected, device=device)])
    assert dense_forward(model, whole).logits[PROMPT - 1 : -1].argmax(-1).tolist() == expected


def test_dropped_rings_are_rebuilt(device: str, tmp_path: Path, seed: int) -> None:
    """Bounded replay rebuilds the consumers' rings, leaves stored rings and old entries as they are, and the run goes on as one
    that lost its dropped rings at the boundary without ever being stored.
    """
    model = tiny_model(device, seed, SMALL)
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, PROMPT)).to(device)
    first, _ = stored_run(model, ids, tmp_path)
    run, state_id = restored_run(model, ids, tmp_path, first, rebuild=True)
    restored_end = run.svc.table.kv_cached_end.clone()
    restored = run.state.cache.stored(state_id).clone()
    old = {layer: run.state.compressed[layer][state_id, e].clone() for layer, e in run.entries_below_boundary().items()}
    assert run.q_start(state_id) == BOUNDARY - SMALL.window
    run.prefill_step(state_id, restored_end)
    assert run.q_start(state_id) == BOUNDARY
    assert torch.equal(run.state.cache.stored(state_id), restored)
    tokens = run.finish(state_id, restored_end)
    for layer, entries in run.entries_below_boundary().items():
        assert torch.equal(run.state.compressed[layer][state_id, entries], old[layer])

    other = Run(model, ids)
    other.svc.admit(2, **other.admission())
    while other.q_start(2) < BOUNDARY:
        other.prefill_step(2)
    for layer in range(model.config.producers, model.config.layers):
        other.state.rings[layer][2].fill_(NAN_BYTE)
    other.svc.release(2)
    begin = BOUNDARY - SMALL.window
    other.svc.admit(2, begin, swa_valid_start=begin, kv_cached_end=BOUNDARY, **other.admission())
    other.svc.flush()
    assert other.finish(2, other.svc.table.kv_cached_end.clone()) == tokens
