from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WhoAmIRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhoAmIReply(_message.Message):
    __slots__ = ("name", "identity", "subject", "groups", "expires_ms", "rights")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    identity: str
    subject: str
    groups: _containers.RepeatedScalarFieldContainer[str]
    expires_ms: int
    rights: _containers.RepeatedCompositeFieldContainer[Right]
    def __init__(self, name: _Optional[str] = ..., identity: _Optional[str] = ..., subject: _Optional[str] = ..., groups: _Optional[_Iterable[str]] = ..., expires_ms: _Optional[int] = ..., rights: _Optional[_Iterable[_Union[Right, _Mapping]]] = ...) -> None: ...

class Right(_message.Message):
    __slots__ = ("verbs", "pools", "tenants")
    VERBS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    verbs: _containers.RepeatedScalarFieldContainer[str]
    pools: _containers.RepeatedScalarFieldContainer[str]
    tenants: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, verbs: _Optional[_Iterable[str]] = ..., pools: _Optional[_Iterable[str]] = ..., tenants: _Optional[_Iterable[str]] = ...) -> None: ...
