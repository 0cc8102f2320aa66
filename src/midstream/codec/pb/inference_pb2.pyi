from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "session_id", "resume_from_token", "model")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    session_id: str
    resume_from_token: int
    model: str
    def __init__(self, prompt: _Optional[str] = ..., session_id: _Optional[str] = ..., resume_from_token: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token", "token_index", "is_final")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_FIELD_NUMBER: _ClassVar[int]
    token: str
    token_index: int
    is_final: bool
    def __init__(self, token: _Optional[str] = ..., token_index: _Optional[int] = ..., is_final: _Optional[bool] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("session_id", "acked_token_index")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ACKED_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    acked_token_index: int
    def __init__(self, session_id: _Optional[str] = ..., acked_token_index: _Optional[int] = ...) -> None: ...

class AckResponse(_message.Message):
    __slots__ = ("session_id", "acked_token_index", "journaled_token_count", "first_retained_index")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ACKED_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    JOURNALED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_RETAINED_INDEX_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    acked_token_index: int
    journaled_token_count: int
    first_retained_index: int
    def __init__(self, session_id: _Optional[str] = ..., acked_token_index: _Optional[int] = ..., journaled_token_count: _Optional[int] = ..., first_retained_index: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("session_id", "cancelled")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    cancelled: bool
    def __init__(self, session_id: _Optional[str] = ..., cancelled: _Optional[bool] = ...) -> None: ...
