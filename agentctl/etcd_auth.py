"""Sets up etcd's users and roles over its gRPC API, as corefleet/etcd_roles.py plans it."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from etcd.api.authpb import auth_pb2
from etcd.api.etcdserverpb import rpc_pb2, rpc_pb2_grpc

from corefleet.errors import Conflict, Unavailable
from corefleet.etcd_roles import KEYS, RANGE_END, Found, Step, plan
from corefleet.grpc_tls import open_channel
from corefleet.subjects import EVERY_KEY
from corefleet.tls import TlsFiles

_CALL_S = 10.0


async def set_up(endpoint: str, tls: TlsFiles, *, dry_run: bool) -> list[Step]:
    """Carry out what is missing, and return it; with `dry_run` only return it.

    Every step may be repeated: after a failure the next run does the rest. Raises Conflict
    when etcd refuses us, Unavailable when it does not answer.
    """
    channel = open_channel(endpoint, tls.current(), [])
    try:
        auth = rpc_pb2_grpc.AuthStub(channel)
        steps = plan(await _found(auth))
        if not dry_run:
            for step in steps:
                await _carry_out(auth, step)
        return steps
    except grpc.aio.AioRpcError as error:
        story = f"etcd at {endpoint}: {error.details()} ({error.code().name})"
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise Unavailable(story) from error
        raise Conflict(f"{story}; expected a certificate of the role operator") from error
    finally:
        await channel.close(None)


async def _found(auth: Any) -> Found:
    enabled = (await auth.AuthStatus(rpc_pb2.AuthStatusRequest(), timeout=_CALL_S)).enabled
    listed = await auth.UserList(rpc_pb2.AuthUserListRequest(), timeout=_CALL_S)
    users: dict[str, tuple[str, ...]] = {}
    for name in listed.users:
        user = await auth.UserGet(rpc_pb2.AuthUserGetRequest(name=name), timeout=_CALL_S)
        users[name] = tuple(user.roles)
    roles = frozenset((await auth.RoleList(rpc_pb2.AuthRoleListRequest(), timeout=_CALL_S)).roles)
    granted = False
    if KEYS in roles:
        role = await auth.RoleGet(rpc_pb2.AuthRoleGetRequest(role=KEYS), timeout=_CALL_S)
        granted = _permission() in role.perm
    return Found(enabled, users, roles, granted)


async def _carry_out(auth: Any, step: Step) -> None:
    match step.verb:
        case "add role":
            await auth.RoleAdd(rpc_pb2.AuthRoleAddRequest(name=step.role), timeout=_CALL_S)
        case "grant keys":
            await auth.RoleGrantPermission(
                rpc_pb2.AuthRoleGrantPermissionRequest(name=step.role, perm=_permission()),
                timeout=_CALL_S,
            )
        case "add user":
            options = auth_pb2.UserAddOptions(no_password=True)
            await auth.UserAdd(
                rpc_pb2.AuthUserAddRequest(name=step.user, options=options), timeout=_CALL_S
            )
        case "grant role":
            await auth.UserGrantRole(
                rpc_pb2.AuthUserGrantRoleRequest(user=step.user, role=step.role), timeout=_CALL_S
            )
        case "revoke role":
            await auth.UserRevokeRole(
                rpc_pb2.AuthUserRevokeRoleRequest(name=step.user, role=step.role), timeout=_CALL_S
            )
        case "enable":
            await auth.AuthEnable(rpc_pb2.AuthEnableRequest(), timeout=_CALL_S)


def _permission() -> Any:
    return auth_pb2.Permission(
        permType=auth_pb2.Permission.READWRITE,
        key=EVERY_KEY.encode(),
        range_end=RANGE_END.encode(),
    )
