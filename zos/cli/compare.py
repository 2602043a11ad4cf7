"""Bitwise comparison of results, metadata and records as named arrays, and the poison that shows unwritten elements."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

from zos.block_view import OUTPUTS, BlockView
from zos.mailbox import StepRecord
from zos.metadata import PrefillMetadata, StepMetadata

POISON = -7  # no output may hold it
PLAIN_OUTPUTS = (
    "kv_swa_index_offset_len",
    "kv_swa_index",
    "kv_swa_full_index_pivots",
    "swa_len",
    "positions",
    "input_ids",
    "swa_write_slot",
    "token_row",
    "token_state_id",
    "cu_seqlens_q",
    "seqlens_q",
    "seqlens_k",
    "num_tokens",
    "tickets",
    "swa_load_plan",
    "last_token_index",
    "kv_swa_full_index",
)


def first_mismatch(actual: np.ndarray, expected: np.ndarray) -> str | None:
    """Return None for equal dtype, shape and values; else what differs, the first place and both values."""
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, expected {expected.shape}"
    different = actual != expected
    if not different.any():
        return None
    place = tuple(int(i) for i in np.argwhere(different)[0]) if actual.ndim else ()
    count = f"{int(different.sum())} of {actual.size} differ"
    return f"{count}, first at {list(place)}: {actual[place]}, expected {expected[place]}"


def metadata_tensors(metadata: StepMetadata) -> dict[str, torch.Tensor]:
    """Every output of a prepare, the tickets included, by the names that the oracle uses."""
    tensors = {name: getattr(metadata, name) for name in PLAIN_OUTPUTS if getattr(metadata, name, None) is not None}
    for ratio in metadata.compression_index:
        tensors[f"compression_write_slot[{ratio}]"] = metadata.compression_write_slot[ratio]
        tensors[f"compression_index[{ratio}]"] = metadata.compression_index[ratio]
    if isinstance(metadata, PrefillMetadata) and metadata.tail is not None:
        for field in fields(metadata.tail):
            tensors[f"tail.{field.name}"] = getattr(metadata.tail, field.name)
    return tensors


def block_view_tensors(view: BlockView) -> dict[str, torch.Tensor]:
    """Every output of a view_block by name, in the operator's order."""
    return {name: getattr(view, name) for name in OUTPUTS}


def block_view_arrays(view: BlockView) -> dict[str, np.ndarray]:
    """Return them as NumPy arrays; from a CPU they are views."""
    return {name: tensor.cpu().numpy() for name, tensor in block_view_tensors(view).items()}


def metadata_arrays(metadata: StepMetadata) -> dict[str, np.ndarray]:
    """Return them as NumPy arrays; from a CPU they are views, which the next prepare overwrites."""
    return {name: tensor.cpu().numpy() for name, tensor in metadata_tensors(metadata).items()}


def poison(metadata: StepMetadata) -> None:
    """Fill every output with a value that none may hold, so that an element left unwritten shows."""
    for tensor in metadata_tensors(metadata).values():
        tensor.fill_(POISON)


def record_arrays(record: StepRecord) -> dict[str, np.ndarray]:
    """Return a step record's fields as arrays, by the names that the oracle uses; kept_tokens only where it has any."""
    return {name: np.asarray(value) for name, value in record._asdict().items() if value is not None}
