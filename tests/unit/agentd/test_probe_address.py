"""Where controlds are told to probe a node."""

from __future__ import annotations

import pytest

from agentd.settings import check_config
from corefleet.config import AgentdConfig
from corefleet.errors import ConfigError


def config(listen: str, advertise: str = "") -> AgentdConfig:
    return AgentdConfig(
        node_id="n1",
        data_dir="/tmp/x",
        insecure=True,
        probe_listen=listen,
        probe_advertise=advertise,
    )


@pytest.mark.parametrize("listen", ["0.0.0.0:7071", "[::]:7071", ":7071"])
def test_an_address_that_everybody_has_is_refused(listen: str) -> None:
    """A controld that is told 0.0.0.0 probes its own machine."""
    with pytest.raises(ConfigError, match=r"probe_listen.*probe_advertise"):
        check_config(config(listen), "agentd.toml")
    check_config(config(listen, "node-1:7071"), "agentd.toml")


@pytest.mark.parametrize("advertise", ["0.0.0.0:7071", "node-1", "node-1:port"])
def test_what_is_advertised_must_be_host_and_port(advertise: str) -> None:
    with pytest.raises(ConfigError, match="probe_advertise"):
        check_config(config("0.0.0.0:7071", advertise), "agentd.toml")


def test_an_address_of_this_node_is_told_as_it_is() -> None:
    check_config(config("10.0.0.7:7071"), "agentd.toml")
    check_config(config("127.0.0.1:0"), "agentd.toml")
