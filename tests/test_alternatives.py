"""Test that what benchmarks compare with computes the same metadata: a reference that is wrong would prove nothing."""

from __future__ import annotations

import pytest
import torch

from tests.reference import assert_bitwise_equal
from zos.cli.alternatives import TorchMetadata, torch_metadata
from zos.cli.bench import ragged_service


@pytest.mark.parametrize("token_layout", ["packed", "strided"])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_torch_ops(device: str, token_layout: str, rows: int) -> None:
    """Ragged rows, padding, scattered states: every output, bit for bit."""
    svc, metadata = ragged_service(rows, device, token_layout)
    geometry, (ratio,) = svc.geometry, metadata.compression_index
    arguments = (
        svc.table.records, metadata.state_ids, geometry.window, geometry.ring, geometry.tokens_per_step, ratio,
        metadata.operands["compression_entries"][0], token_layout == "packed",
    )  # fmt: skip
    found = torch_metadata(*arguments)
    for name in TorchMetadata._fields:
        expected = getattr(metadata, name)
        expected = expected if isinstance(expected, torch.Tensor) else expected[ratio]
        assert_bitwise_equal(getattr(found, name).cpu().numpy(), expected.cpu().numpy(), name)


@pytest.mark.gpu
def test_torch_compile() -> None:
    """Compiled for the device, the torch ops give the same."""
    svc, metadata = ragged_service(64, "cuda", "strided")
    geometry = svc.geometry
    arguments = (geometry.window, geometry.ring, geometry.tokens_per_step, 2, 7, False)
    found = torch.compile(torch_metadata)(svc.table.records, metadata.state_ids, *arguments)
    assert torch.equal(found.kv_swa_index, metadata.kv_swa_index) and torch.equal(found.tickets, metadata.tickets)


@pytest.mark.gpu
def test_triton_index() -> None:
    """The kernels written the way public engines do it give our index."""
    pytest.importorskip("triton")
    from zos.cli.triton_index import triton_index

    svc, metadata = ragged_service(64, "cuda", "strided")
    index = torch.full_like(metadata.kv_swa_index, 77)
    geometry = svc.geometry
    triton_index(svc.table.records, metadata.state_ids, index, geometry.ring, geometry.tokens_per_step)()
    assert torch.equal(index, metadata.kv_swa_index)
