"""The short form of a rollout: one bare host becomes a whole fleet."""

from __future__ import annotations

from pathlib import Path

from tests.rollout.fleet import Rollout, be_patient
from tests.rollout.machines import bare_guest
from tools.guest import payload
from tools.guest.image import Image
from tools.guest.steps import Steps

_SITE_LIMIT_S = 2400.0


def test_a_bare_host_runs_a_task_after_site_and_a_second_run_changes_nothing(
    bare: tuple[Image, Path], rollout: Rollout, rollout_steps: Steps
) -> None:
    image, state = bare
    with bare_guest(image, state, "c1", {}, rollout_steps) as guest:
        assert guest.run("ls -d /opt/corefleet /etc/corefleet").out == ""
        be_patient(guest)
        rollout.write_inventory({"c1": guest}, payload.version())
        first = rollout.must("site", limit_s=_SITE_LIMIT_S)
        assert first.changed["c1"] > 0
        assert "corefleet works on c1" in first.out
        second = rollout.must("site", limit_s=_SITE_LIMIT_S)
        assert second.changed == {"c1": 0}, second.out
        assert "corefleet works on c1" in second.out
        for key in guest.must("ls /etc/corefleet/pki/*.key").split():
            assert guest.must(f"stat -c '%a %U' {key}") == "640 root"
