"""zos: the sequence-metadata service of an LLM decode engine with zero-overhead scheduling."""

from zos.allocator import StateSlotAllocator
from zos.block_view import BlockView
from zos.bounded_replay import ReplayPlan, plan_bounded_replay
from zos.cache import SwaCache
from zos.device_loop import DeviceLoop
from zos.entry import EntryFormat
from zos.errors import (
    BoundaryError,
    CorruptStateError,
    DeviceStateError,
    EditsDuringCaptureError,
    KernelNotReadyError,
    MailboxFullError,
    MailboxOverrunError,
    MetadataReplacedError,
    MissingStateError,
    NoFreeStateError,
    OtherKeyError,
    OtherLayoutError,
    OtherVersionError,
    StateInUseError,
    StateNotLiveError,
    StoreError,
    StoreUnavailableError,
)
from zos.geometry import CompressionRing, RingGeometry
from zos.include import get_include
from zos.layout import CompressionState, StateSlotLayout
from zos.loop import DecodeLoop
from zos.mailbox import Mailbox, StepRecord
from zos.metadata import DecodeMetadata, PrefillMetadata
from zos.prefill_tail import PrefillTail
from zos.requests import Request, RequestState
from zos.service import MetadataService
from zos.snapshots import Snapshot, SnapshotPool
from zos.state_store import StateStore
from zos.steps import StepResult
from zos.store import LocalStateStore, MooncakeStateStore
from zos.table import ErrorCode, Phase, SequenceTable

__version__ = "0.1.0"

__all__ = [
    "BlockView",
    "BoundaryError",
    "CompressionRing",
    "CompressionState",
    "CorruptStateError",
    "DecodeLoop",
    "DecodeMetadata",
    "DeviceLoop",
    "DeviceStateError",
    "EditsDuringCaptureError",
    "EntryFormat",
    "ErrorCode",
    "KernelNotReadyError",
    "LocalStateStore",
    "Mailbox",
    "MailboxFullError",
    "MailboxOverrunError",
    "MetadataReplacedError",
    "MetadataService",
    "MissingStateError",
    "MooncakeStateStore",
    "NoFreeStateError",
    "OtherKeyError",
    "OtherLayoutError",
    "OtherVersionError",
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
    "StateInUseError",
    "StateNotLiveError",
    "StateSlotAllocator",
    "StateSlotLayout",
    "StateStore",
    "StepRecord",
    "StepResult",
    "StoreError",
    "StoreUnavailableError",
    "SwaCache",
    "get_include",
    "plan_bounded_replay",
]
