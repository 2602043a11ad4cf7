"""The exceptions that a caller may want to act on; every other mistake is a plain ValueError or IndexError."""

from __future__ import annotations

from device_kernels.module import KernelNotReadyError
from zos.table import Fault

__all__ = [
    "DeviceStateError",
    "EditsDuringCaptureError",
    "KernelNotReadyError",
    "MailboxFullError",
    "MailboxOverrunError",
    "MetadataReplacedError",
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
