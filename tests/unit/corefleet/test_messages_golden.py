"""What older and newer programs wrote is read as it was meant."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from corefleet import codec
from corefleet.errors import CorruptRecord
from corefleet.messages import links, wire
from tests.unit.corefleet.golden.forms import Form, broken, form_of, load
from tests.unit.corefleet.golden.samples import SAMPLES, message_types, name_of

KINDS = message_types()
FORMS = load()
REGENERATE = "run `python -m tests.unit.corefleet.golden` and commit what it adds"

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: name_of(type(s)))


def _required_only(kind: type[msgspec.Struct], sample: msgspec.Struct) -> dict[str, Any]:
    needed = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
    tag = kind.__struct_config__.tag_field
    whole = msgspec.to_builtins(sample)
    return {key: value for key, value in whole.items() if key in needed or key == tag}


@every_kind
def test_every_message_has_a_sample(kind: type[msgspec.Struct]) -> None:
    samples = [sample for sample in SAMPLES if type(sample) is kind]

    assert len(samples) == 1
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    unset = [
        name
        for name, field in fields.items()
        if name != "v" and not field.required and getattr(samples[0], name) == field.default
    ]
    assert unset == [], "a sample sets every field to something else than its default"


@every_sample
def test_present_bytes_are_the_newest_golden_form(sample: msgspec.Struct) -> None:
    forms = FORMS.get(name_of(type(sample)), [])

    assert forms, REGENERATE
    assert forms[-1] == form_of(sample), REGENERATE
    assert codec.decode(bytes.fromhex(forms[-1].bytes), type(sample)) == sample


@pytest.mark.parametrize("name", sorted(FORMS))
def test_old_bytes_are_read_as_they_were_meant(name: str) -> None:
    for form in FORMS[name]:
        assert broken(form, KINDS.get(name)) is None


@every_sample
def test_a_field_of_a_newer_version_is_skipped(sample: msgspec.Struct) -> None:
    newer = msgspec.msgpack.decode(codec.encode(sample))
    newer["zz_of_a_newer_version"] = {"nested": [1, 2]}

    assert codec.decode(codec.encode(newer), type(sample)) == sample


@every_sample
def test_fields_that_an_older_version_lacked_take_their_defaults(sample: msgspec.Struct) -> None:
    kind = type(sample)
    oldest = msgspec.msgpack.decode(codec.encode(sample))
    oldest = {key: oldest[key] for key in _required_only(kind, sample)}

    read = codec.decode(codec.encode(oldest), kind)

    for field in msgspec.structs.fields(kind):
        if field.required:
            assert getattr(read, field.name) == getattr(sample, field.name)
        elif field.default is not msgspec.NODEFAULT:
            assert getattr(read, field.name) == field.default


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS.values() if any(f.required for f in msgspec.structs.fields(kind))],
    ids=name_of,
)
def test_a_missing_required_field_is_named(kind: type[msgspec.Struct]) -> None:
    needed = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
    sample = next(sample for sample in SAMPLES if type(sample) is kind)
    cut = msgspec.msgpack.decode(codec.encode(sample))
    del cut[needed[0]]

    with pytest.raises(CorruptRecord, match=rf"{kind.__name__}: .*`{needed[0]}`"):
        codec.decode(codec.encode(cut), kind)


@pytest.mark.parametrize(
    ("union", "base"),
    [
        (wire.TaskEvent, wire.Event),
        (links.WorkerToAgentd | links.AgentdToWorker, links.Frame),
        (links.WorkerToEngine, links.Frame),
        (links.EngineToWorker, links.Frame),
    ],
)
def test_tagged_messages_are_told_apart(union: Any, base: type[msgspec.Struct]) -> None:
    members = [s for s in SAMPLES if isinstance(s, base) and type(s) in union.__args__]
    one_way = union if union != links.WorkerToAgentd | links.AgentdToWorker else None

    assert members
    for sample in members:
        kind = one_way or (
            links.WorkerToAgentd
            if type(sample) in links.WorkerToAgentd.__args__
            else links.AgentdToWorker
        )
        assert msgspec.msgpack.decode(codec.encode(sample), type=kind) == sample


def test_a_golden_form_that_is_no_longer_read_is_found() -> None:
    form = FORMS["records.TaskRecord"][0]
    lying = Form(form.bytes, {**form.means, "attempt": 99})
    torn = Form(form.bytes[:-8], form.means)

    assert broken(form, KINDS["records.TaskRecord"]) is None
    assert "99" in (broken(lying, KINDS["records.TaskRecord"]) or "")
    assert "TaskRecord" in (broken(torn, KINDS["records.TaskRecord"]) or "")
    assert broken(form, None) == "the message type is gone"
