"""Bitwise comparison of integer results, and the metadata as named arrays."""

from __future__ import annotations

import numpy as np

from zos.metadata import DecodeMetadata

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
)


def first_mismatch(actual: np.ndarray, expected: np.ndarray) -> str | None:
    """Return None for equal dtype, shape and bytes; else what differs, with the first place and both values."""
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, expected {expected.shape}"
    different = actual != expected
    if not different.any():
        return None
    place = tuple(int(i) for i in np.argwhere(different)[0]) if actual.ndim else ()
    return f"{int(different.sum())} of {actual.size} differ, first at {list(place)}: {actual[place]}, expected {expected[place]}"


def metadata_arrays(metadata: DecodeMetadata) -> dict[str, np.ndarray]:
    """Every output of a prepare as a NumPy array, by the names that the oracle uses."""
    arrays = {name: getattr(metadata, name) for name in PLAIN_OUTPUTS if getattr(metadata, name) is not None}
    for ratio in metadata.compression_index:
        arrays[f"compression_write_slot[{ratio}]"] = metadata.compression_write_slot[ratio]
        arrays[f"compression_index[{ratio}]"] = metadata.compression_index[ratio]
    return {name: tensor.cpu().numpy() for name, tensor in arrays.items()}
