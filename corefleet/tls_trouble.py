"""Why a TLS connection did not come about, in words that name the cause.

gRPC tells that a peer is not reached, nats-py an error of OpenSSL. What an operator has to know
is which certificate is wrong, and for whom.
"""

from __future__ import annotations

import asyncio
import ssl

from corefleet.tls import TlsFiles

_ASK_S = 1.0
"""How long a peer is given to refuse us."""

# X509_V_ERR_* of x509_vfy.h.
_EXPIRED, _NOT_YET_VALID = 10, 9
_UNTRUSTED = frozenset({2, 18, 19, 20, 21, 27})
_OTHER_NAME = frozenset({62, 63, 64})

_ALERTS = {
    "UNKNOWN_CA": "it does not believe who signed {cert}",
    "BAD_CERTIFICATE": "it refuses {cert}: perhaps its CA is not the one that signed it",
    "CERTIFICATE_EXPIRED": "{cert} has expired",
    "CERTIFICATE_REVOKED": "{cert} is revoked",
    "CERTIFICATE_UNKNOWN": "it refuses {cert}",
    "CERTIFICATE_REQUIRED": "it asks for a certificate and got none",
}


def why(error: BaseException, peer: str, files: TlsFiles | None) -> str:
    """Return one sentence on what `error` of a connection to `peer`, host:port, says."""
    cert = f"our certificate {files.cert}" if files is not None else "our certificate"
    if isinstance(error, ssl.SSLCertVerificationError):
        ca = files.ca if files is not None else "a CA that we know"
        if error.verify_code in _UNTRUSTED:
            return f"the certificate of {peer} is not signed by {ca}"
        if error.verify_code == _EXPIRED:
            return f"the certificate of {peer} has expired"
        if error.verify_code == _NOT_YET_VALID:
            return f"the certificate of {peer} is not valid yet; are the clocks right?"
        if error.verify_code in _OTHER_NAME:
            return f"the certificate of {peer} is for another hostname: {error.verify_message}"
        return f"the certificate of {peer} is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        if reason == "WRONG_VERSION_NUMBER":
            return f"{peer} does not speak TLS"
        for alert, told in _ALERTS.items():
            if reason.endswith(f"ALERT_{alert}"):
                return f"{peer} refuses us: {told.format(cert=cert)}"
        return f"TLS with {peer} failed: {reason.replace('_', ' ').lower()}"
    return str(error) or repr(error)


async def ask(address: str, files: TlsFiles, *, greeted: bool = False) -> str:
    """Return why a server at `address`, host:port, is not reached; '' when it would be.

    Connects once, within two seconds. The server speaks gRPC, or with `greeted` says a line
    in plain text before TLS begins, as NATS does.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    context = files.current().client_context()
    if not greeted:
        context.set_alpn_protocols(["h2"])
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_ASK_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            if greeted:
                await reader.readline()
            await writer.start_tls(context, server_hostname=host)
        return await _refusal(reader, address, files)
    except TimeoutError:
        return f"{address} does not answer"
    except (OSError, ValueError) as error:
        return why(error, address, files)
    finally:
        if writer is not None:
            writer.transport.abort()


async def _refusal(reader: asyncio.StreamReader, address: str, files: TlsFiles) -> str:
    """Wait for a no: by TLS 1.3 a server refuses us when we believe to be connected."""
    try:
        async with asyncio.timeout(_ASK_S):
            if await reader.read(1):
                return ""
    except TimeoutError:
        return ""
    return f"{address} closes the connection: perhaps it refuses our certificate {files.cert}"


def why_refused(error: BaseException) -> str:
    """Return one sentence on why a connection was not accepted from a client."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return "it has no certificate"
        if reason in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER"):
            return "it does not speak TLS"
        return f"TLS failed: {reason.replace('_', ' ').lower()}"
    return str(error) or repr(error)


async def speaks_tls(address: str) -> bool:
    """Return whether `address`, host:port, shakes hands; its certificate is not looked at."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(_ASK_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except ssl.SSLError as error:
        return error.reason != "WRONG_VERSION_NUMBER"
    except (OSError, ValueError):
        return False
    writer.transport.abort()
    return True
