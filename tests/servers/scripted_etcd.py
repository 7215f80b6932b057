"""An etcd that says what a test tells it to, for what a real one does too seldom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from etcd.api.etcdserverpb import rpc_pb2, rpc_pb2_grpc


class ScriptedMember(rpc_pb2_grpc.WatchServicer, rpc_pb2_grpc.MaintenanceServicer):  # type: ignore[misc]
    """Answers each watch by the next of `scripts` and breaks it off; then refuses.

    `starts` are the revisions from which the watches were to begin.
    """

    def __init__(self, *scripts: list[Any], version: str = "3.5.16") -> None:
        self._scripts = iter(scripts)
        self._version = version
        self.starts: list[int] = []

    async def Status(self, request: Any, context: Any) -> Any:  # noqa: N802
        return rpc_pb2.StatusResponse(version=self._version)

    async def Watch(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in requests:
            self.starts.append(request.create_request.start_revision)
            break
        script = next(self._scripts, None)
        if script is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "end of the script")
            return
        for response in script:
            yield response
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken off")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve and yield the endpoint."""
        server = grpc.aio.server()
        rpc_pb2_grpc.add_WatchServicer_to_server(self, server)
        rpc_pb2_grpc.add_MaintenanceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
        await server.stop(None)


def response(revision: int, *changed: int, **fields: Any) -> Any:
    """Return a watch response of a store at `revision` with one event per number of `changed`."""
    answer = rpc_pb2.WatchResponse(**fields)
    answer.header.cluster_id = answer.header.cluster_id or 7
    answer.header.revision = revision
    for number in changed:
        event = answer.events.add()
        event.kv.key, event.kv.mod_revision = b"k/%d" % len(answer.events), number
    return answer
