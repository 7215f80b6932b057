"""Loads what a pool runs: its agent and its tools. Once a worker, before the first task."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentd.worker.stages import DeclaredAgent
from agentd.worker.tools import LoadedTool, Toolbox, ToolThreads
from corefleet.agent import Agent
from corefleet.builtin_tools import BUILTIN
from corefleet.errors import ConfigError, InvalidInput
from corefleet.messages.records import PoolSpec, ToolSpec
from corefleet.tool import Tool, tool


@dataclass(frozen=True, slots=True)
class LoadedPool:
    """A pool ready to run tasks."""

    spec: PoolSpec
    agent: Agent
    toolbox: Toolbox


def load_pool(spec: PoolSpec) -> LoadedPool:
    """Import the pool's agent and tools; raises ConfigError naming what could not be loaded."""
    for directory in reversed(spec.python_path):
        entry = str(Path(directory).resolve())
        if entry not in sys.path:
            sys.path.insert(0, entry)
    threads = ToolThreads()
    tools = {each.name: _load_tool(spec, each, threads) for each in spec.tools}
    return LoadedPool(spec, _load_agent(spec), Toolbox(tools, threads))


def _load_agent(spec: PoolSpec) -> Agent:
    if spec.agent == "declared":
        return DeclaredAgent(spec)
    where = f"pool {spec.name}: agent {spec.agent}"
    made = _imported(where, spec.agent)
    if not (isinstance(made, type) and issubclass(made, Agent)):
        raise ConfigError(f"{where}: {made!r} is not a subclass of corefleet.agent.Agent")
    try:
        return made()
    except Exception as error:  # the user's constructor may raise anything
        raise ConfigError(f"{where}: cannot be made: {_told(error)}") from error


def _load_tool(spec: PoolSpec, wanted: ToolSpec, threads: ToolThreads) -> LoadedTool:
    where = f"pool {spec.name}: tool {wanted.name}"
    if wanted.source == "builtin":
        found = BUILTIN.get(wanted.name)
        if found is None:
            raise ConfigError(f"{where}: not built in; built in are: {', '.join(BUILTIN)}")
    else:
        found = _imported(f"{where}: {wanted.source}", wanted.source)
    try:
        if not isinstance(found, Tool):
            if not callable(found):
                raise ConfigError(f"{where}: {wanted.source} is not a function")
            found = tool(found)
        return LoadedTool(wanted, found, threads)
    except InvalidInput as error:
        raise ConfigError(f"{where}: {error}") from error


def _imported(where: str, source: str) -> Any:
    module, _, name = source.partition(":")
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ConfigError(f"{where}: import of {module} failed: {_told(error)}") from error
    if not hasattr(loaded, name):
        raise ConfigError(f"{where}: {module} has no {name!r}")
    return getattr(loaded, name)


def _told(error: BaseException) -> str:
    """The error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
