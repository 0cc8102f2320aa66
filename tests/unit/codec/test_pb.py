"""The definition of the service stays what it is, and the generated code is made from it."""

from __future__ import annotations

import re
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from midstream.codec.pb import inference_connect, inference_pb
from midstream.codec.pb import inference_pb2 as pb
from midstream.wire import GRPC_SERVICE
from tools.proto import ROOT, stale

# Never changed, since clients out there are made of it.  What is new takes a new number, and a line here.
MESSAGES = {
    "GenerateRequest": {"prompt": (1, "string"), "session_id": (2, "string"), "resume_from_token": (3, "int32")}
    | {"model": (4, "string")},
    "GenerateResponse": {"token": (1, "string"), "token_index": (2, "int32"), "is_final": (3, "bool")},
    "AckRequest": {"session_id": (1, "string"), "acked_token_index": (2, "int32")},
    "AckResponse": {"session_id": (1, "string"), "acked_token_index": (2, "int32")}
    | {"journaled_token_count": (3, "int32"), "first_retained_index": (4, "int32")},
    "CancelRequest": {"session_id": (1, "string")},
    "CancelResponse": {"session_id": (1, "string"), "cancelled": (2, "bool")},
}
TYPES = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_BOOL: "bool",
}


def test_generated_code_is_what_the_definition_says() -> None:
    """Whoever changes proto/inference.proto runs `make proto`."""
    assert stale() == []


def test_messages_have_the_fields_they_always_had() -> None:
    """Names, numbers and types."""
    found = {
        name: {field.name: (field.number, TYPES[field.type]) for field in kind.fields}
        for name, kind in pb.DESCRIPTOR.message_types_by_name.items()
    }
    assert found == MESSAGES


def test_service_has_the_methods_it_always_had() -> None:
    """Generate alone is a stream, and only on the way back."""
    service = pb.DESCRIPTOR.services_by_name["InferenceService"]
    assert service.full_name == GRPC_SERVICE
    found: dict[str, Any] = {
        method.name: (method.input_type.name, method.output_type.name, method.client_streaming, method.server_streaming)
        for method in service.methods
    }
    assert found == {
        "Generate": ("GenerateRequest", "GenerateResponse", False, True),
        "Ack": ("AckRequest", "AckResponse", False, False),
        "Cancel": ("CancelRequest", "CancelResponse", False, False),
    }


def test_both_runtimes_write_the_same_bytes() -> None:
    """grpcio's and Connect's classes are made of one definition."""
    fields: dict[str, Any] = {"prompt": "你 a", "session_id": "s", "resume_from_token": 300, "model": "m"}
    assert inference_pb.GenerateRequest(**fields).to_binary() == pb.GenerateRequest(**fields).SerializeToString()
    assert inference_connect.InferenceService.desc().type_name == GRPC_SERVICE


def test_every_field_and_method_is_explained() -> None:
    """The definition is all that many users of it ever read."""
    lines = (ROOT / "proto" / "inference.proto").read_text(encoding="utf-8").splitlines()
    for at, line in enumerate(lines):
        if re.match(r"  (rpc|string|int32|bool) ", line) and "session_id = 1" not in line:
            assert lines[at - 1].startswith("  //"), line
