"""zos: the sequence-metadata service of an LLM decode engine with zero-overhead scheduling."""

from zos.allocator import StateSlotAllocator
from zos.block_view import BlockView
from zos.bounded_replay import ReplayPlan, plan_bounded_replay
from zos.cache import SwaCache
from zos.device_loop import DeviceLoop
from zos.entry import EntryFormat
from zos.errors import (
    DeviceStateError,
    EditsDuringCaptureError,
    KernelNotReadyError,
    MailboxFullError,
    MailboxOverrunError,
    MetadataReplacedError,
)
from zos.geometry import CompressionRing, RingGeometry
from zos.layout import CompressionState, StateSlotLayout
from zos.loop import DecodeLoop
from zos.mailbox import Mailbox, StepRecord
from zos.metadata import DecodeMetadata, PrefillMetadata
from zos.prefill_tail import PrefillTail
from zos.requests import Request, RequestState
from zos.service import MetadataService
from zos.snapshots import Snapshot, SnapshotPool
from zos.steps import StepResult
from zos.table import ErrorCode, Phase, SequenceTable

__version__ = "0.1.0"

__all__ = [
    "BlockView",
    "CompressionRing",
    "CompressionState",
    "DecodeLoop",
    "DecodeMetadata",
    "DeviceLoop",
    "DeviceStateError",
    "EditsDuringCaptureError",
    "EntryFormat",
    "ErrorCode",
    "KernelNotReadyError",
    "Mailbox",
    "MailboxFullError",
    "MailboxOverrunError",
    "MetadataReplacedError",
    "MetadataService",
    "Phase",
    "PrefillMetadata",
    "PrefillTail",
    "ReplayPlan",
    "Request",
    "RequestState",
    "RingGeometry",
    "SequenceTable",
    "Snapshot",
    "SnapshotPool",
    "StateSlotAllocator",
    "StateSlotLayout",
    "StepRecord",
    "StepResult",
    "SwaCache",
    "plan_bounded_replay",
]
