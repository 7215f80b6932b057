"""Runs tools: only those of the pool, with arguments that their schema accepts, in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import thread_time_ns
from typing import Any

from agentd.worker.meter import Meter, Metered
from agentd.worker.state import pack
from corefleet.errors import InvalidInput, ToolFailed
from corefleet.messages.links import ToolDefinition
from corefleet.messages.records import ToolSpec
from corefleet.tool import KEY_PARAMETER, Tool

MAX_RESULT_BYTES = 64 * 1024
MAX_ERROR_CHARACTERS = 2000
_THREADS = 32
_LOST_LIMIT = 8


class ToolThreads:
    """Threads for plain tools. One that does not come back in time is given up.

    A thread cannot be ended, so when too many are given up, fresh ones replace them all.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._lost = 0

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns; cancelled, its thread goes on by itself."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tool")
        future = asyncio.get_running_loop().run_in_executor(self._executor, function)
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up_one()
            raise

    def close(self) -> None:
        """Let go of the threads; those that still run a tool are not waited for."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _give_up_one(self) -> None:
        self._lost += 1
        if self._lost >= _LOST_LIMIT:
            self._lost = 0
            self.close()


class LoadedTool:
    """One tool as the pool allows it. Made once a worker."""

    def __init__(self, spec: ToolSpec, tool: Tool, threads: ToolThreads) -> None:
        """Raises InvalidInput when the tool's JSON Schema is none."""
        self.name = spec.name
        self.at_most_once = spec.at_most_once or tool.at_most_once
        self.definition = ToolDefinition(spec.name, tool.description, tool.parameters)
        self._timeout_s = min(spec.timeout_s, tool.timeout_s or spec.timeout_s)
        self._tool = tool
        self._is_async = tool.is_async
        self._threads = threads
        self._validator = None if tool.arguments else _validator(spec.name, tool.parameters)

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the function's keyword arguments; raises ToolFailed saying what is wrong.

        A schema that was derived from type hints is checked by converting to those
        types, which is the same and 20 times as fast.
        """
        if self._validator is not None:
            self._validator(arguments)
            return dict(arguments)
        return self._tool.typed(arguments)

    async def run(self, values: dict[str, Any], key: str, meter: Meter) -> bytes:
        """Call the tool and return its result as MessagePack; raises ToolFailed."""
        if self._tool.takes_key:
            values[KEY_PARAMETER] = key
        try:
            if self._is_async:
                result = await self._awaited(values, meter)
            else:
                result = await self._in_thread(values, meter)
        except ToolFailed as error:
            raise ToolFailed(str(error)[:MAX_ERROR_CHARACTERS]) from error
        except (Exception, SystemExit) as error:  # a tool's code may raise anything
            text = f"{self.name}: {type(error).__name__}: {error}"
            raise ToolFailed(text[:MAX_ERROR_CHARACTERS]) from error
        return self._packed(result)

    async def _awaited(self, values: dict[str, Any], meter: Meter) -> Any:
        running = Metered(self._tool.function(**values), meter)
        if running.begin():
            return running.result
        async with self._limit():
            return await running

    async def _in_thread(self, values: dict[str, Any], meter: Meter) -> Any:
        async with self._limit():
            return await self._threads.run(lambda: _measured(self._tool.function, values, meter))

    @asynccontextmanager
    async def _limit(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                yield
        except TimeoutError as error:
            if limit.expired():
                raise ToolFailed(f"{self.name}: no result within {self._timeout_s} s") from error
            raise

    def _packed(self, result: Any) -> bytes:
        try:
            data = pack(result, "result")
        except InvalidInput as error:
            raise ToolFailed(f"{self.name}: {error}") from error
        if len(data) > MAX_RESULT_BYTES:
            raise ToolFailed(
                f"{self.name}: a result of {len(data)} bytes; at most {MAX_RESULT_BYTES}"
            )
        return data


class Toolbox:
    """The tools of a pool, by name."""

    def __init__(self, tools: Mapping[str, LoadedTool], threads: ToolThreads) -> None:
        self.names = tuple(tools)
        self.threads = threads
        self._tools = tools
        self._definitions: dict[tuple[str, ...], tuple[ToolDefinition, ...]] = {}

    def get(self, name: str) -> LoadedTool:
        """Return the tool `name`; raises ToolFailed when the pool does not allow it."""
        tool = self._tools.get(name)
        if tool is None:
            raise ToolFailed(f"{name} is not allowed here; allowed: {self._allowed()}")
        return tool

    def definitions(self, names: tuple[str, ...]) -> tuple[ToolDefinition, ...]:
        """Return the tools `names` as the model is told of them; raises InvalidInput."""
        known = self._definitions.get(names)
        if known is None:
            for name in names:
                if name not in self._tools:
                    raise InvalidInput("tools", name, f"tools of the pool: {self._allowed()}")
            known = tuple(self._tools[name].definition for name in names)
            self._definitions[names] = known
        return known

    def _allowed(self) -> str:
        return ", ".join(self.names) or "none"


def _measured(function: Callable[..., Any], values: dict[str, Any], meter: Meter) -> Any:
    began = thread_time_ns()
    try:
        return function(**values)
    except SystemExit as error:
        raise ToolFailed(f"SystemExit: {error}") from error
    finally:
        meter.cpu_ns += thread_time_ns() - began


def _validator(name: str, schema: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Compile a JSON Schema. Imports jsonschema, which costs a start-up 0.1 s, only if needed."""
    import jsonschema

    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise InvalidInput(f"schema of tool {name}", error.message, "a JSON Schema") from error
    compiled = kind(schema)

    def validate(arguments: dict[str, Any]) -> None:
        wrong = jsonschema.exceptions.best_match(compiled.iter_errors(arguments))
        if wrong is not None:
            at = "".join(f".{part}" for part in wrong.absolute_path)
            raise ToolFailed(f"{name}: arguments{at}: {wrong.message}")

    return validate
