"""corefleet/rpc is what proto/ makes."""

from __future__ import annotations

from pathlib import Path

from tools import proto


def test_generated_code_is_current() -> None:
    assert proto.differences(proto.generate(), proto.RPC) == [], "run `make proto`"


def test_what_is_not_current_is_named(tmp_path: Path) -> None:
    made = {"a_pb2.py": "new\n", "b_pb2.py": "same\n", "c_pb2.py": "missing\n"}
    (tmp_path / "a_pb2.py").write_text("old\n")
    (tmp_path / "b_pb2.py").write_text("same\n")
    (tmp_path / "d_pb2.py").write_text("left over\n")

    lines = proto.differences(made, tmp_path)

    assert [line.split(":")[0] for line in lines] == ["a_pb2.py", "c_pb2.py", "d_pb2.py"]


def test_every_service_has_stubs() -> None:
    made = proto.generate()

    assert {"tasks_pb2.py", "tasks_pb2.pyi", "tasks_pb2_grpc.py"} < set(made)
    assert "class FleetStub" in made["fleet_pb2_grpc.py"]
    assert not any("from corefleet.v1" in text for text in made.values())
