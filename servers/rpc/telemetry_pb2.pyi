from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TelemetryEvent(_message.Message):
    __slots__ = ("compile", "steps", "progress", "memory", "under_way")
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_FIELD_NUMBER: _ClassVar[int]
    compile: CompileEvent
    steps: StepRecords
    progress: Progress
    memory: MemoryReading
    under_way: CompileUnderWay
    def __init__(self, compile: _Optional[_Union[CompileEvent, _Mapping]] = ..., steps: _Optional[_Union[StepRecords, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., memory: _Optional[_Union[MemoryReading, _Mapping]] = ..., under_way: _Optional[_Union[CompileUnderWay, _Mapping]] = ...) -> None: ...

class StepRecords(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[StepRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ...) -> None: ...

class CompileEvent(_message.Message):
    __slots__ = ("event_id", "kind", "start_ns", "end_ns", "compile_id", "frame", "reason", "shape", "dynamic", "cache", "batch_id", "request_ids", "backend_ns", "phase", "breaks")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    COMPILE_ID_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_NS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BREAKS_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    kind: str
    start_ns: int
    end_ns: int
    compile_id: str
    frame: str
    reason: str
    shape: str
    dynamic: bool
    cache: str
    batch_id: int
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    backend_ns: int
    phase: str
    breaks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, event_id: _Optional[str] = ..., kind: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., compile_id: _Optional[str] = ..., frame: _Optional[str] = ..., reason: _Optional[str] = ..., shape: _Optional[str] = ..., dynamic: bool = ..., cache: _Optional[str] = ..., batch_id: _Optional[int] = ..., request_ids: _Optional[_Iterable[str]] = ..., backend_ns: _Optional[int] = ..., phase: _Optional[str] = ..., breaks: _Optional[_Iterable[str]] = ...) -> None: ...

class CompileUnderWay(_message.Message):
    __slots__ = ("kind", "start_ns", "end_ns", "compile_id", "shape", "batch_id", "phase")
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    COMPILE_ID_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    start_ns: int
    end_ns: int
    compile_id: str
    shape: str
    batch_id: int
    phase: str
    def __init__(self, kind: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., compile_id: _Optional[str] = ..., shape: _Optional[str] = ..., batch_id: _Optional[int] = ..., phase: _Optional[str] = ...) -> None: ...

class MemoryReading(_message.Message):
    __slots__ = ("at_ns", "memory_bytes", "reserved_bytes", "peak_bytes")
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    at_ns: int
    memory_bytes: int
    reserved_bytes: int
    peak_bytes: int
    def __init__(self, at_ns: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("step_id", "kind", "start_ns", "end_ns", "batch", "padded_batch", "tokens", "padded_tokens", "compiled")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PADDED_BATCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    kind: str
    start_ns: int
    end_ns: int
    batch: int
    padded_batch: int
    tokens: int
    padded_tokens: int
    compiled: bool
    def __init__(self, step_id: _Optional[int] = ..., kind: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., batch: _Optional[int] = ..., padded_batch: _Optional[int] = ..., tokens: _Optional[int] = ..., padded_tokens: _Optional[int] = ..., compiled: bool = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("at_ns", "stage", "done", "total", "detail")
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    at_ns: int
    stage: str
    done: int
    total: int
    detail: str
    def __init__(self, at_ns: _Optional[int] = ..., stage: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("arm", "replica", "config_json", "versions", "counters", "memory_bytes", "startup_ns", "device", "vocab_size", "dtype", "blind_spots")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MemoryBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StartupNsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ARM_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STARTUP_NS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLIND_SPOTS_FIELD_NUMBER: _ClassVar[int]
    arm: str
    replica: str
    config_json: str
    versions: _containers.ScalarMap[str, str]
    counters: _containers.ScalarMap[str, int]
    memory_bytes: _containers.ScalarMap[str, int]
    startup_ns: _containers.ScalarMap[str, int]
    device: str
    vocab_size: int
    dtype: str
    blind_spots: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, arm: _Optional[str] = ..., replica: _Optional[str] = ..., config_json: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., counters: _Optional[_Mapping[str, int]] = ..., memory_bytes: _Optional[_Mapping[str, int]] = ..., startup_ns: _Optional[_Mapping[str, int]] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., blind_spots: _Optional[_Iterable[str]] = ...) -> None: ...
