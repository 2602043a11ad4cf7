"""An engine loop on top of the service, without zos.DecodeLoop: admit, prefill, one graph a step, records, release.

    python examples/generate_loop.py --device cpu

What an engine of its own has to do is all here: it stages edits, launches, and reads records; it never asks the device where a
sequence is. The model is the random V4.1-shaped one of zos.v4; any other takes its place as `prefill` and `decode`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

import zos
from zos.v4.config import V4Config
from zos.v4.model import V4Model, input_ids
from zos.v4.speculative import SpeculativeStep
from zos.v4.state import V4State
from zos.v4.step import PrefillStep

ROWS, CHUNK, TOKENS, MOST_AHEAD = 4, 32, 24, 8
PROMPTS = ["The ring holds", "a window of", "tokens,", "and rejected drafts", "are", "written over."]


class Engine:
    """Decodes up to ROWS prompts at once."""

    def __init__(self, device: str) -> None:
        config = V4Config.tiny()
        self.model = V4Model(config, device, seed=1)
        self.svc = zos.MetadataService(
            ROWS, ROWS, config.geometry, device, CHUNK, "strided", config.compression_rings(), carry_tokens=True
        )
        self.state = V4State(config, ROWS, 256, device)
        self.decode = SpeculativeStep(self.model, self.state, self.svc)
        self.svc.attach_mailbox(records=4 * MOST_AHEAD, kept_tokens=True)
        self.svc.set_batch(range(ROWS))  # all states, always: rows that are not LIVE are padding
        self.svc.flush()
        self.replay = self.captured_step() if device == "cuda" else self.step
        self.read = 0  # number of the last step whose record was read
        self.text: dict[int, list[int]] = {}  # generated ids by state

    def step(self) -> None:
        """One decode step: metadata, model, verification, and the sequences move on; the host learns of it later."""
        metadata = self.svc.prepare()
        self.svc.commit(metadata, *self.decode(metadata))

    def captured_step(self) -> Callable[[], None]:
        """The same as a graph. Warm-up runs on padding, as no state is admitted yet."""
        self.svc.warmup()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()
        self.svc.wait(self.svc.slot_steps_launched())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self.step()
            self.svc.publish()

        def replay() -> None:
            self.svc.flush()  # edits staged since: admissions, releases
            graph.replay()
            self.svc.launched(1)

        return replay

    def prefill(self, state_id: int, prompt: str) -> None:
        """Admit a prompt and run its chunks; how many there are the host knows, so it waits for nothing."""
        ids = torch.tensor(list(prompt.encode()))
        self.state.set_prompt(state_id, ids.to(self.svc.device))
        self.svc.admit(state_id, prompt_end=len(ids), decode_q=1, stop_at=len(ids) + TOKENS)
        self.svc.set_prefill_batch([state_id])
        for _ in range(-(-len(ids) // CHUNK)):
            metadata = self.svc.prepare_prefill()
            step = PrefillStep(self.model.config, self.state, metadata)
            hidden = self.model(input_ids(metadata, self.state, self.svc.table.prompt_end), step)
            bonus = self.model.logits(hidden[step.last_token_index]).argmax(1)
            next_tokens = torch.nn.functional.pad(bonus[:, None], (0, self.svc.geometry.draft_tokens))
            self.svc.commit(metadata, metadata.seqlens_q, None, next_tokens)
        self.text[state_id] = []

    def run(self, prompts: Sequence[str]) -> None:
        """Generate for all prompts: the host runs up to MOST_AHEAD steps ahead of what it has read."""
        waiting, running, free = list(enumerate(prompts)), dict[int, int](), list(range(ROWS))
        while waiting or running:
            while waiting and free:
                number, prompt = waiting.pop(0)
                running[free[0]] = number
                self.prefill(free.pop(0), prompt)
            self.replay()
            behind = self.svc.slot_steps_launched() - MOST_AHEAD
            for record in self.svc.wait(behind) if behind > self.read else self.svc.poll():
                self.read = record.step
                for row in () if record.prefill else record.kept.nonzero()[0]:
                    state_id = int(record.state_ids[row])
                    self.text[state_id] += record.kept_tokens[row, : record.kept[row]].tolist()
                    if record.finished[row]:
                        print(f"{prompts[running.pop(state_id)]!r}: {self.text[state_id]}")
                        self.svc.release(state_id)
                        free.append(state_id)
        self.svc.check()


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate for a few prompts."""
    parser = argparse.ArgumentParser(description="An engine loop of its own on top of the service.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    Engine(parser.parse_args(arguments).device).run(PROMPTS)


if __name__ == "__main__":
    main()
