"""Mailbox: what every step came to, in memory that both sides see; the host reads it without a CUDA call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import numpy as np
import torch

import zos.ops
from host_fallback.mailbox import (
    CHECKSUM,
    HEAD,
    HEADER_WORDS,
    MAIL_HEADER_WORDS,
    PAYLOAD_WORDS,
    ROW_WORDS,
    ROWS,
    TAIL,
    TOKENS_PER_ROW,
    checksum,
    record_words,
)
from zos.arguments import whole_number
from zos.errors import MailboxOverrunError
from zos.mapped import shared_zeros

POLL_S = 20e-6  # between looks, in a wait
IS_FINISHED, IS_ERROR, IS_STALE, IS_DUPLICATE, IS_DEFERRED, IS_REFILLED = 1, 2, 4, 8, 16, 32


class StepRecord(NamedTuple):
    """What a step came to; arrays are by batch row, [B], and the reader's own."""

    step: int  # number of the record, from 1
    prefill: bool  # of a prefill batch
    state_ids: np.ndarray  # int32: whose row it was, -1 for none
    generations: np.ndarray  # int32: generation of the ticket; 0 where the row had no tokens
    q_start: np.ndarray  # int32: after the step; 0 where the row had no tokens
    kept: np.ndarray  # int32: tokens that the sequence moved on by
    flags: np.ndarray  # int32: bits IS_FINISHED … IS_REFILLED
    next_state_ids: np.ndarray  # int32: what the batch row holds after the step
    kept_tokens: np.ndarray | None  # int64 [B, Q]: ids of the tokens kept, then -1
    errors: int  # rows of this step that are in error
    deferred: int  # rows of this step that did not fit
    stale: int  # results that came for a former life of their state
    duplicate: int  # results that had counted before
    batch_version: int  # how often the slot's batch has changed
    batches_refused: int  # set_batch edits that the device refused so far
    ready_taken: int  # entries of the ready queue taken so far

    @property
    def finished(self) -> np.ndarray:
        """Rows whose sequence ended in this step: bool [B]."""
        rows: np.ndarray = (self.flags & IS_FINISHED) != 0
        return rows

    @property
    def failed(self) -> np.ndarray:
        """Rows that are in error: bool [B]."""
        rows: np.ndarray = (self.flags & IS_ERROR) != 0
        return rows

    @property
    def refilled(self) -> np.ndarray:
        """Rows that a waiting sequence took over: bool [B]."""
        rows: np.ndarray = (self.flags & IS_REFILLED) != 0
        return rows


class Mailbox:
    """Records of the last steps of one metadata slot.

    `commit` leaves a record of each step in device memory; `publish` copies what is new to mapped host memory, with a number before
    and after it and a checksum, so that a torn record is never taken for a whole one.

    Parameters
    ----------
    records : int
        Records it holds: how far the device may be ahead of the reader.
    max_batch : int
        Most rows of a step.
    tokens_per_step : int
        Token ids of a row, where they are kept.
    kept_tokens : bool
        Whether records have room for token ids.
    device : torch.device
        Where the steps run.
    first : int
        Steps of the slot that ran before: the first record has the number after.

    Attributes
    ----------
    results, results_state : torch.Tensor
        What `commit` writes: int32 [records, words], int64 [2] (records committed, records published).
    publish : callable
        Launches a publication on the current stream; may be captured, between two commits of the slot.
    first : int
        Steps of the slot that ran before it.
    next_step : int
        Number of the record that the reader gets next.
    has_reader : bool
        Whether anyone has ever looked.
    """

    def __init__(
        self,
        records: int,
        max_batch: int,
        tokens_per_step: int,
        kept_tokens: bool,
        device: torch.device,
        first: int = 0,
    ) -> None:
        self.records = whole_number("records", records, 2)
        self.kept_tokens = kept_tokens
        words = record_words(max_batch, tokens_per_step if kept_tokens else 0)
        self.results = torch.zeros(self.records, words, dtype=torch.int32, device=device)
        self.results_state = torch.full((2,), first, dtype=torch.int64, device=device)
        self.memory, mailbox = shared_zeros(self.records * (MAIL_HEADER_WORDS + words), torch.int32, device)
        self._mails = self.memory.numpy().reshape(self.records, -1)
        self._numbers = self._mails.view(np.int64)  # the same words, for heads and tails
        self.publish: Callable[[], None] = zos.ops.bind_publish_results(
            results=self.results, results_state=self.results_state, mailbox=mailbox.view(self.records, -1)
        )
        self.first = first
        self.next_step = first + 1
        self.has_reader = False
        self._undelivered: list[StepRecord] = []  # read by a call that then raised

    def read(self) -> StepRecord | None:
        """Return the next record, or None while it is not there; no CUDA call.

        Raises
        ------
        MailboxOverrunError
            The device has overwritten records that were not read; reading goes on at the oldest one left.
        """
        self.has_reader = True
        place = self.next_step % self.records
        tail = self._numbers[place, TAIL // 2]
        if tail > self.next_step:
            self._overrun()
        if tail != self.next_step:
            return None
        mail = self._mails[place]
        words = int(mail[PAYLOAD_WORDS])
        if not HEADER_WORDS <= words <= len(mail) - MAIL_HEADER_WORDS:
            return None
        payload = mail[MAIL_HEADER_WORDS : MAIL_HEADER_WORDS + words].copy()
        expected = int(mail[CHECKSUM]) % 2**32
        if self._numbers[place, HEAD // 2] > self.next_step:
            self._overrun()
        if checksum(payload) != expected:
            return None  # torn: it will be whole at the next look
        self.next_step += 1
        return parsed(payload)

    def poll(self) -> list[StepRecord]:
        """Return the records that have come since the last call, in order; no CUDA call.

        Raises
        ------
        MailboxOverrunError
            As read; what was read before comes with the next call.
        """
        while (record := self.read()) is not None:
            self._undelivered.append(record)
        return self._delivered()

    def wait(self, step: int, timeout_s: float) -> list[StepRecord]:
        """Return the records that come until that of `step` is among them, in order.

        Raises
        ------
        TimeoutError
            It did not come in time; what did come comes with the next call.
        MailboxOverrunError
            As poll.
        """
        deadline = time.perf_counter() + timeout_s
        while self.next_step <= step:
            record = self.read()
            if record is not None:
                self._undelivered.append(record)
            elif time.perf_counter() > deadline:
                raise TimeoutError(
                    f"record of step {step} did not come within {timeout_s} s; last read: {self.next_step - 1}"
                )
            else:
                time.sleep(POLL_S)
        return self._delivered()

    def _delivered(self) -> list[StepRecord]:
        records, self._undelivered = self._undelivered, []
        return records

    def _overrun(self) -> NoReturn:
        """Go on at the oldest record that is left, and say which ones are gone."""
        newest = int(self._mails[:, TAIL : TAIL + 2].copy().view(np.int64).max())
        lost, self.next_step = self.next_step, max(self.next_step + 1, newest - self.records + 1)
        raise MailboxOverrunError(
            f"records {lost} … {self.next_step - 1} were overwritten before they were read: read more often, or attach a mailbox "
            f"of more than {self.records} records"
        )


def parsed(payload: np.ndarray) -> StepRecord:
    """Take apart the payload of a record, int32 words (device_kernels/results.cuh); its arrays are views."""
    rows, tokens = int(payload[ROWS]), int(payload[TOKENS_PER_ROW])
    end = HEADER_WORDS + ROW_WORDS * rows
    arrays = payload[HEADER_WORDS:end].reshape(ROW_WORDS, rows)
    header = payload[:HEADER_WORDS].tolist()
    return StepRecord(
        step=int(payload[:2].view(np.int64)[0]),
        prefill=bool(header[3]),
        state_ids=arrays[0],
        generations=arrays[1],
        q_start=arrays[2],
        kept=arrays[3],
        flags=arrays[4],
        next_state_ids=arrays[5],
        kept_tokens=payload[end : end + 2 * rows * tokens].view(np.int64).reshape(rows, tokens) if tokens else None,
        errors=header[7],
        deferred=header[8],
        stale=header[9],
        duplicate=header[10],
        batch_version=header[4],
        batches_refused=header[5],
        ready_taken=header[6],
    )
