"""Packs what one host gets: `bundle.py ISSUED NAME ARCHIVE ROLE=GROUP...`.

ISSUED is where `agentctl pki renew --from` wrote. Owners, groups and modes are in the archive,
so that it is unpacked in one step and compared in one.
"""

import io
import os
import sys
import tarfile
from pathlib import Path


def main(issued: str, name: str, archive: str, *roles: str) -> None:
    """Write the archive when its content is not what it should be; say so then."""
    files = [("ca.pem", Path(issued, "ca.pem"), "root", 0o644)]
    for each in roles:
        role, _, group = each.partition("=")
        at = Path(issued, role, name)
        files.append((role + ".key", at / (role + ".key"), group, 0o640))
        files.append((role + ".pem", at / (role + ".pem"), group, 0o644))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as out:
        for called, file, group, mode in files:
            data = file.read_bytes()
            entry = tarfile.TarInfo(called)
            entry.size, entry.mode, entry.mtime = len(data), mode, int(file.stat().st_mtime)
            entry.uname, entry.gname = "root", group
            out.addfile(entry, io.BytesIO(data))
    target = Path(archive)
    if target.exists() and target.read_bytes() == packed.getvalue():
        return
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    target.unlink(missing_ok=True)
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(packed.getvalue())
    sys.stdout.write(f"{archive}\n")


main(*sys.argv[1:])
