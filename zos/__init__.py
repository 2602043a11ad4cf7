"""zos: the sequence-metadata service of an LLM decode engine with zero-overhead scheduling."""

from zos.bounded_replay import ReplayPlan, plan_bounded_replay
from zos.cache import SwaCache
from zos.entry import EntryFormat
from zos.errors import DeviceStateError, EditsDuringCaptureError, KernelNotReadyError, MetadataReplacedError
from zos.geometry import CompressionRing, RingGeometry
from zos.layout import CompressionState, StateSlotLayout
from zos.loop import DecodeLoop, StepResult
from zos.metadata import DecodeMetadata, PrefillMetadata
from zos.service import MetadataService
from zos.table import ErrorCode, Phase, SequenceTable

__version__ = "0.1.0"

__all__ = [
    "CompressionRing",
    "CompressionState",
    "DecodeLoop",
    "DecodeMetadata",
    "DeviceStateError",
    "EditsDuringCaptureError",
    "EntryFormat",
    "ErrorCode",
    "KernelNotReadyError",
    "MetadataReplacedError",
    "MetadataService",
    "Phase",
    "PrefillMetadata",
    "ReplayPlan",
    "RingGeometry",
    "SequenceTable",
    "StateSlotLayout",
    "StepResult",
    "SwaCache",
    "plan_bounded_replay",
]
