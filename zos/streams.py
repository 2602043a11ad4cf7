"""StreamOrder: keeps a service's launches in call order when the caller changes streams."""

from __future__ import annotations

import weakref

import torch


class StreamOrder:
    """Orders launches across streams with one event, recorded after the last launch; on the CPU there is nothing to order.

    While a capture runs, no event is recorded or awaited: it would become part of the graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_stream: torch.cuda.Stream | None = None
        self._last_address = -1  # of that stream: cheaper to compare
        self._recorded = True  # the event stands behind the last launch
        self._last_launch = torch.cuda.Event() if device.type == "cuda" else None

    def capturing(self) -> bool:
        """Whether the current stream of the device is being captured into a CUDA graph."""
        if self._last_launch is None:
            return False
        if torch.cuda.current_device() == self._device.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def keep_until_launched(self, owner: object, *memory: object) -> None:
        """Keep `memory` alive until the last launch is over, when `owner` is gone.

        Pinned memory goes back to torch's pool, and so to the next user, at once: a launch still queued would read or write it.
        """
        if self._last_launch is not None:
            weakref.finalize(owner, _wait_for_last_launch, self, *memory)

    def synchronize(self) -> None:
        """Wait for the last launch."""
        if self._last_launch is not None and self._last_stream is not None:
            if self._recorded:
                self._last_launch.synchronize()
            else:
                self._last_stream.synchronize()

    def join(self) -> None:
        """Before a launch: make the current stream wait for the last launch, if that went to another stream.

        Raises
        ------
        RuntimeError
            The last launch was a graph's, and its stream is being captured by now.
        """
        if self._last_launch is None or self._last_stream is None or self._address() == self._last_address:
            return
        if self.capturing():
            return
        if not self._recorded:
            self._record_late(self._last_launch, self._last_stream)
        torch.cuda.current_stream(self._device).wait_event(self._last_launch)

    def mark(self) -> None:
        """After a launch: remember it as the last one."""
        if self._last_launch is None or self.capturing():
            return
        self._remember_stream()
        assert self._last_stream is not None
        self._last_launch.record(self._last_stream)
        self._recorded = True

    def mark_replay(self) -> None:
        """After the replay of a graph: remember it as the last launch, its event to be recorded when another stream asks for it.

        An event between two replays would keep the second from starting right behind the first; recorded late it waits for what
        was launched on the stream since, too.
        """
        if self._last_launch is not None:
            self._remember_stream()
            self._recorded = False

    def _remember_stream(self) -> None:
        address = self._address()
        if self._last_stream is None or address != self._last_address:
            self._last_stream, self._last_address = torch.cuda.current_stream(self._device), address

    def _record_late(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "the stream of the service's last replay is being captured: make a service call there before the capture"
                )
        event.record(stream)
        self._recorded = True

    def _address(self) -> int:
        """Return the current stream's address; torch's own way to it is a tenth as fast."""
        address: int = torch._C._cuda_getCurrentRawStream(self._device.index)
        return address


def _wait_for_last_launch(order: StreamOrder, *_: object) -> None:
    order.synchronize()
