"""The exceptions that a caller may want to act on; every other mistake is a plain ValueError or IndexError."""

from __future__ import annotations

from device_kernels.module import KernelNotReadyError
from zos.table import Fault

__all__ = [
    "BoundaryError",
    "CorruptStateError",
    "DeviceStateError",
    "EditsDuringCaptureError",
    "KernelNotReadyError",
    "MailboxFullError",
    "MailboxOverrunError",
    "MetadataReplacedError",
    "MissingStateError",
    "NoFreeStateError",
    "OtherKeyError",
    "OtherLayoutError",
    "OtherVersionError",
    "StateInUseError",
    "StateNotLiveError",
    "StoreError",
    "StoreUnavailableError",
]


class DeviceStateError(RuntimeError):
    """States are in error on the device; `faults` lists each with its field, value and rule."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        lines = [f"state_id {f.state_id}: {f.field}={f.value} ({f.code.name}): {f.rule}" for f in faults]
        super().__init__("\n".join([f"{len(faults)} state(s) in error", *lines]))


class EditsDuringCaptureError(RuntimeError):
    """Staged edits would be captured into a graph and applied again at every replay."""


class MetadataReplacedError(ValueError):
    """The metadata's slot was since prepared with another batch size, so its tickets are gone."""


class MailboxFullError(RuntimeError):
    """A step would run further ahead of the mailbox's reader than the mailbox has records; nothing was launched."""


class MailboxOverrunError(RuntimeError):
    """Records of a mailbox were overwritten before they were read."""


class StoreError(RuntimeError):
    """An external store refused a put or a get; nothing was changed, and a sequence can start by bounded replay instead."""


class MissingStateError(StoreError):
    """There is no state under the key."""


class CorruptStateError(StoreError):
    """The bytes found are no whole state: truncated, flipped, or something else."""


class OtherVersionError(StoreError):
    """The state was written in another version of the format."""


class OtherLayoutError(StoreError):
    """The state was written with another layout, of which more than the ring's length differs."""


class OtherKeyError(StoreError):
    """The state found was stored under another key."""


class BoundaryError(StoreError, ValueError):
    """The boundary does not fit: its window is no longer in the ring, is not final yet, or could not be gone on from."""


class StateNotLiveError(StoreError, ValueError):
    """The state to be stored holds no sequence: it is free or in error."""


class StateInUseError(StoreError, ValueError):
    """The state to restore into holds a sequence."""


class NoFreeStateError(StoreError):
    """The allocator has no state slot to restore into."""


class StoreUnavailableError(StoreError):
    """The back end failed, or did not answer in time."""
