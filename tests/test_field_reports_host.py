"""Test of reports that only a GPU can show, as far as the host decides them: a fake says what is queued, current, captured."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import zos
import zos.nvtx
from device_kernels import launch as launch_module
from device_kernels import module
from device_kernels.launch import LaunchError
from device_kernels.module import Kernel
from zos.steps import CapturedSteps

REPLAYS = 10


def test_a04_a_queued_flush_keeps_its_ids() -> None:
    """What was packed for a launch that has not begun is not overwritten by what is staged for the next."""
    svc = zos.MetadataService(capacity=16, max_batch=2, device="cpu")
    for state_id in (3, 4, 7, 8):
        svc.admit(state_id, q_start=1000, seqlen_q=6)
    svc.flush()
    queue: list[Callable[[], None]] = []  # of a stream that is busy
    apply_edits, metadata = svc._edits.launch, svc.slot_metadata(0, 2, 12)
    svc._edits.launch = lambda: queue.append(apply_edits)
    offsets: list[list[int]] = []
    for states in ([3, 4], [7, 8]):
        svc.set_batch(states)
        svc.flush()
        queue.append(metadata.launch_prepare)
        queue.append(lambda: offsets.append(metadata.kv_swa_index_offset_len[[0, 6], 0].tolist()))
    for launch in queue:
        launch()
    assert offsets == [[471, 605], [1007, 1141]]


class FakeDevices:
    """Two devices, of which one is current: what torch.cuda says of them."""

    def __init__(self, current: int) -> None:
        self.current = current

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of torch.cuda's functions."""
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "set_device", lambda index: setattr(self, "current", index))
        patch.setattr(torch.cuda, "device", self.selected)
        patch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=1))
        patch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))

    @contextmanager
    def selected(self, index: int) -> Iterator[None]:
        """Make a device current, and the one before it afterwards."""
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before


class Driver:
    """A driver that answers every launch with a code."""

    def __init__(self, code: int) -> None:
        self.code, self.launches = code, 0

    def cuLaunchKernelEx(self, *arguments: object) -> int:
        """Count a launch."""
        self.launches += 1
        return self.code

    def cuGetErrorName(self, code: int, name: object) -> None:
        """Know none."""


def test_a14_a_refused_launch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that the driver refuses, as of too large a grid, is an exception with its shape, not a printed line."""
    FakeDevices(0).install(monkeypatch)
    driver = Driver(0)
    monkeypatch.setattr(launch_module, "_driver", lambda: driver)
    kernel = Kernel("probe", "probe", "q")
    kernel._functions[0] = SimpleNamespace(kernel=SimpleNamespace(ptr=1))
    bound = kernel.bind(torch.device("cuda", 0), (1, 65_536), (32, 1), 0)
    bound()
    driver.code = 1  # CUDA_ERROR_INVALID_VALUE
    with pytest.raises(LaunchError, match=r"\[1, 65536, 1\], \[32, 1, 1\]"):
        bound()
    assert driver.launches == 2


@pytest.mark.parametrize(("current", "used"), [(1, 0), (0, 1), (0, 0)])
def test_a21_a_launch_leaves_the_current_device(current: int, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is launched on its tensors' device, and the device that was current still is, also after an error."""
    devices, launched_on = FakeDevices(current), []
    devices.install(monkeypatch)

    def launch(function: int, stream: int) -> None:
        launched_on.append(devices.current)
        if len(launched_on) == 2:
            raise LaunchError("refused")

    monkeypatch.setattr(module, "Launch", lambda *arguments: launch)
    kernel = Kernel("probe", "probe", "q")
    kernel._functions[used] = SimpleNamespace(kernel=SimpleNamespace(ptr=1))
    bound = kernel.bind(torch.device("cuda", used), (1, 1), (1, 1), 0)
    bound()
    assert (launched_on, devices.current) == ([used], current)
    with pytest.raises(LaunchError, match="refused"):
        bound()
    assert (launched_on, devices.current) == ([used, used], current)


def test_a23_no_kernel_is_loaded_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that would have to be loaded inside a capture is refused before anything is loaded."""
    FakeDevices(0).install(monkeypatch)
    loaded: list[str] = []

    def load(stem: str, capability: tuple[int, int]) -> Any:
        loaded.append(stem)
        return SimpleNamespace(get_function=lambda name: name)

    monkeypatch.setattr(module, "_module", load)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = Kernel("probe", "probe", "q")
    with pytest.raises(zos.KernelNotReadyError, match=r"call MetadataService.warmup\(\) before the capture"):
        kernel.load(0)
    assert loaded == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert kernel.load(0) == "probe" and loaded == ["probe"]


def loaded_anew(name: str) -> ModuleType:
    """Run a module once more, beside the one that was imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


def test_a28_every_replay_has_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's range is there once a replay: ten replays of one captured graph have ten."""
    told: list[str] = []
    monkeypatch.setattr(zos.nvtx, "ENABLED", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    svc = zos.MetadataService(capacity=16, max_batch=1, device="cpu")
    svc.admit(3, q_start=1000)
    loop = loaded_anew("zos.loop").DecodeLoop(svc, lambda metadata: metadata.seqlens_q, records=0)
    graph: Any = SimpleNamespace(replay=lambda: told.append("replay"))
    loop._captured = lambda batch, tokens: CapturedSteps(graph, graph, svc.slot_metadata(0, batch, tokens), [])
    loop._on_cuda = True
    loop.set_batch([3])
    svc.flush()
    told.clear()
    loop.run(steps=REPLAYS)
    assert told == ["zos.step", "replay", "end"] * REPLAYS
