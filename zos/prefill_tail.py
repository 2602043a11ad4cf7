"""PrefillTail: the packed sub-batch of each prompt's last W tokens, and the fixed buffers behind it.

YOCO's consumer layers run on those tokens alone (decoder-side bounded replay); their rings hold nothing below a prompt's last
window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zos.ops import bind_prefill_tail


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PrefillTail:
    """What the layers that run on tails alone read; T' = min(T, B * max(W, Q)) token places, packed; PAD stands in brackets.

    The pivots point into a buffer of B * W history rows, which `swa_load_plan` fills (row i's W positions before its tail),
    followed by the tail's own tokens.
    """

    token_index: torch.Tensor  # int64 [T']: token place in the whole step [-1]
    positions: torch.Tensor  # int64 [T']: absolute position [0]
    kv_swa_full_index_pivots: torch.Tensor  # int32 [T', 4]: (start, length) in section 1 and in section 2 [0]
    swa_len: torch.Tensor  # int32 [T']: window length [0]
    swa_write_slot: torch.Tensor  # int64 [T']: state_id * R + position % R [-1]
    token_row: torch.Tensor  # int32 [T']: row of the batch [-1]
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]: exclusive prefix sums of the rows' tokens
    num_tokens: torch.Tensor  # int32 [1]: tokens
    # int32 [B, 3, 4]: as PrefillMetadata's, of the history before each tail; W rows of zeros for a row without one
    swa_load_plan: torch.Tensor
    swa_valid_start: torch.Tensor  # int32 [B]: positions below it are missing from these layers' rings [0]
    last_token_index: torch.Tensor  # int64 [B]: place of the row's last token in the tail [-1]


class TailBuffers:
    """Storage of the tails of a slot's prefill steps, sized for `max_batch` rows of steps of `max_prefill_tokens`."""

    def __init__(
        self, max_batch: int, max_prefill_tokens: int, window: int, tokens_per_step: int, device: torch.device
    ) -> None:
        self._most = max_prefill_tokens
        self._per_row = max(window, tokens_per_step)
        places = self._places(max_batch)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._tokens = {
            "token_index": zeros(places, dtype=torch.int64),
            "positions": zeros(places, dtype=torch.int64),
            "kv_swa_full_index_pivots": zeros(places, 4),
            "swa_len": zeros(places),
            "swa_write_slot": zeros(places, dtype=torch.int64),
            "token_row": zeros(places),
        }
        self._rows = {
            "swa_load_plan": zeros(max_batch, 3, 4),
            "swa_valid_start": zeros(max_batch),
            "last_token_index": zeros(max_batch, dtype=torch.int64),
        }
        self._cu_seqlens_q, self._num_tokens = zeros(max_batch + 1), zeros(1)

    def _places(self, batch: int) -> int:
        return min(self._most, batch * self._per_row)

    def view(self, operands: dict[str, Any]) -> tuple[PrefillTail, Callable[[], None]]:
        """View for the batch of a prefill's operands, and the launch that writes it."""
        batch = operands["tickets"].shape[0]
        outputs = {
            **{name: buffer[: self._places(batch)] for name, buffer in self._tokens.items()},
            **{name: buffer[:batch] for name, buffer in self._rows.items()},
            "cu_seqlens_q": self._cu_seqlens_q[: batch + 1],
            "num_tokens": self._num_tokens,
        }
        taken = {name: operands[name] for name in ("records", "tickets", "window", "ring", "tokens_per_step")}
        launch = bind_prefill_tail(**taken, batch_cu_seqlens_q=operands["cu_seqlens_q"], **outputs)
        return PrefillTail(**outputs), launch
