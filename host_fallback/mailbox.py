"""publish_results on the CPU: copies records into the mailbox, as device_kernels/mailbox.cu does."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

HEAD, TAIL, CHECKSUM, PAYLOAD_WORDS, MAIL_HEADER_WORDS = (
    0,
    2,
    4,
    5,
    8,
)  # words of a record in the mailbox; head and tail are int64
ROWS, TOKENS_PER_ROW, HEADER_WORDS, ROW_WORDS = 2, 11, 16, 6  # words of the payload


def record_words(rows: int, tokens_per_row: int) -> int:
    """Words of a record of so many rows."""
    return HEADER_WORDS + rows * (ROW_WORDS + 2 * tokens_per_row)


@lru_cache(maxsize=64)
def _odd_numbers(count: int) -> np.ndarray:
    return np.arange(1, 2 * count, 2, dtype=np.uint32)


def checksum(payload: np.ndarray) -> int:
    """Sum of the int32 words, each times an odd number of its own, wrapping around: words that swap places show."""
    return int(np.dot(payload.view(np.uint32), _odd_numbers(len(payload))))


def bind_publish_results(
    results: torch.Tensor, results_state: torch.Tensor, mailbox: torch.Tensor
) -> Callable[[], None]:
    """Take NumPy views of checked CPU arguments (see `zos.ops`) once; calling the result publishes what is due."""
    records, state, mails = results.numpy(), results_state.numpy(), mailbox.numpy()
    size = len(records)

    def publish() -> None:
        committed, published = state.tolist()
        # Of records that came faster than they were published only the last ones are still there.
        for number in range(max(published + 1, committed - size + 1), committed + 1):
            record, mail = records[number % size], mails[number % size]
            payload = record[: record_words(int(record[ROWS]), int(record[TOKENS_PER_ROW]))]
            mail[HEAD : HEAD + 2].view(np.int64)[0] = number
            mail[MAIL_HEADER_WORDS : MAIL_HEADER_WORDS + len(payload)] = payload
            mail[CHECKSUM : CHECKSUM + 1].view(np.uint32)[0] = checksum(payload)
            mail[PAYLOAD_WORDS] = len(payload)
            mail[TAIL : TAIL + 2].view(np.int64)[0] = number
        state[1] = committed

    return publish


def publish_results(**operands: Any) -> None:
    """Publish once, on the arguments of `bind_publish_results`."""
    bind_publish_results(**operands)()
