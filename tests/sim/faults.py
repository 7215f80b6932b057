"""Makes the faults of a plan happen, and end."""

from __future__ import annotations

import msgspec

from tests.sim.client import SimClients
from tests.sim.controld import SimControld
from tests.sim.fleet import SimFleet
from tests.sim.loop import Process
from tests.sim.nats import SimBus
from tests.sim.node import SimNode
from tests.sim.plan import BUSY_CONTROLD, BUSY_NODE, Fault
from tests.sim.streams import DISK_S

Someone = SimControld | SimNode


class Faults:
    """All faults of one run."""

    def __init__(self, fleet: SimFleet, clients: SimClients) -> None:
        self._fleet = fleet
        self._open = 0
        self._begun = 0
        self._clients = clients

    @property
    def over(self) -> bool:
        """Whether all faults have come and gone."""
        return not self._open and self._begun == len(self._fleet.plan.faults)

    def begin(self, fault: Fault) -> None:
        """Make it happen."""
        self._begun += 1
        fleet = self._fleet
        fault = self._aimed(fault)
        fleet.note("fault", fault.kind, fault.target, fault.lasts, fault.much)
        match fault.kind:
            case "crash":
                self._crash(fault.target, fault.lasts)
            case "machine":
                self._crash(fault.target, fault.lasts)
            case "rack":
                for name, node in list(fleet.nodes.items()):
                    if node.rack == fault.target:
                        self._crash(name, fault.lasts)
            case "restart":
                someone = self._fleet.find(fault.target)
                if someone is not None:
                    someone.stop()
            case "worker":
                node_ = self._fleet.find(fault.target)
                if isinstance(node_, SimNode):
                    node_.kill_worker()
            case "freeze" | "machine_freeze":
                self._freeze(fault)
            case "mute" | "deaf" | "cut" | "slow":
                self._disturb(fault)
            case "probe_cut":
                one, other = fault.target.split()
                fleet.wires.cut.add((one, other))
                self._later(fault.lasts, fleet.wires.cut.discard, (one, other))
            case "etcd_cut":
                self._cut_etcd(fault)
            case "clock":
                fleet.step_clock(fault.target, fault.much)
            case _:
                self._servers(fault)

    def _aimed(self, fault: Fault) -> Fault:
        """Return the fault with a name for who is busy just now."""
        fleet = self._fleet
        if fault.target == BUSY_NODE:
            busiest = max(fleet.nodes.values(), key=lambda each: sum(each.node.counts()))
            return msgspec.structs.replace(fault, target=busiest.name)
        if fault.target == BUSY_CONTROLD:
            return msgspec.structs.replace(fault, target=fleet.properties.decided_last or "c0")
        return fault

    def _servers(self, fault: Fault) -> None:
        fleet = self._fleet
        match fault.kind:
            case "etcd":
                fleet.etcd.lose_leader(fault.lasts)
                self._later(fault.lasts, fleet.note, "etcd is back")
            case "leader":
                fleet.streams.lose_leader(f"cf-{fault.target}", fault.lasts)
                self._later(fault.lasts, fleet.note, "leader is back", fault.target)
            case "nats":
                fleet.nats.restart(fault.lasts)
                self._later(fault.lasts, fleet.note, "nats is back")
            case "slow_disk":
                fleet.streams.disk_s = fault.much
                self._later(fault.lasts, self._set_disk, DISK_S)
            case "lost_acks":
                fleet.streams.lost_acks = fault.much
                self._later(fault.lasts, self._set_acks, 0.0)
            case "lossy":
                self._set_loss(fault.much)
                self._later(fault.lasts, self._set_loss, 0.0)

    def _later(self, after_s: float, work: object, *args: object) -> None:
        """Do `work` when the fault is over."""
        self._open += 1

        def end() -> None:
            self._open -= 1
            work(*args)  # type: ignore[operator]

        self._fleet.after(after_s, end)

    def _crash(self, name: str, down_s: float) -> None:
        someone = self._fleet.find(name)
        if someone is not None:
            self._fleet.note("crash", name)
            someone.gone()
        self._later(down_s, self._fleet.start_again, name)

    def _freeze(self, fault: Fault) -> None:
        someone = self._fleet.find(fault.target)
        if someone is None or someone.process.frozen:
            return
        process = someone.process
        process.freeze()
        if isinstance(someone, SimNode) and fault.kind == "machine_freeze":
            someone.heart_frozen = True
        self._later(fault.lasts, self._thaw, process, someone)

    def _thaw(self, process: Process, someone: Someone) -> None:
        self._fleet.note("thaw", process.name)
        if isinstance(someone, SimNode):
            someone.heart_frozen = False
        process.thaw()

    def _buses(self, someone: Someone) -> list[SimBus]:
        if isinstance(someone, SimNode):
            return [someone.bus, someone.beats_bus]
        return someone.buses

    def _disturb(self, fault: Fault) -> None:
        someone = self._fleet.find(fault.target)
        if someone is None:
            return
        buses = self._buses(someone)
        for bus in buses:
            if fault.kind == "slow":
                bus.up.slow_s = bus.down.slow_s = fault.much
            else:
                bus.cut(up=fault.kind != "deaf", down=fault.kind != "mute")
        if fault.kind == "cut" and isinstance(someone, SimControld):
            self._clients.cut_off[fault.target] = None
        self._later(fault.lasts, self._undisturb, fault, buses)

    def _undisturb(self, fault: Fault, buses: list[SimBus]) -> None:
        self._fleet.note("healed", fault.kind, fault.target)
        self._clients.cut_off.pop(fault.target, None)
        for bus in buses:
            if fault.kind == "slow":
                bus.up.slow_s = bus.down.slow_s = 0.0
            else:
                bus.heal()

    def _cut_etcd(self, fault: Fault) -> None:
        someone = self._fleet.find(fault.target)
        if isinstance(someone, SimControld):
            someone.store.cut(up=fault.much != 1, down=fault.much != 0)
            self._later(fault.lasts, self._heal_etcd, someone)

    def _heal_etcd(self, someone: SimControld) -> None:
        self._fleet.note("healed etcd", someone.name)
        someone.store.heal()

    def _set_disk(self, disk_s: float) -> None:
        self._fleet.streams.disk_s = disk_s

    def _set_acks(self, share: float) -> None:
        self._fleet.streams.lost_acks = share

    def _set_loss(self, share: float) -> None:
        for bus in self._fleet.nats.connections.values():
            bus.up.loss = bus.down.loss = share
