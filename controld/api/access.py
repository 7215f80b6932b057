"""The service that tells callers who they are: corefleet.v1.Access."""

from __future__ import annotations

from controld.api.guard import Access
from corefleet.rpc import access_pb2, access_pb2_grpc


class AccessService(access_pb2_grpc.AccessServicer):
    """Says whom the server takes a caller for, and what that may do."""

    async def WhoAmI(  # noqa: N802
        self, request: access_pb2.WhoAmIRequest, access: Access
    ) -> access_pb2.WhoAmIReply:
        caller = access.caller
        return access_pb2.WhoAmIReply(
            name=caller.name,
            identity=caller.identity,
            subject=caller.who.subject,
            groups=caller.who.groups,
            expires_ms=int(caller.until_s * 1000),
            rights=[
                access_pb2.Right(verbs=verbs, pools=grant.pools, tenants=grant.tenants)
                for grant in access.rights.grants
                if (verbs := grant.gives())
            ],
        )
