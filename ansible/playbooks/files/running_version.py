"""Prints which version a unit's program runs, by the path that it was started with."""

import subprocess
import sys
from pathlib import Path

pid = subprocess.check_output(
    ["systemctl", "show", "-P", "MainPID", sys.argv[1]], text=True
).strip()
script = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() if pid != "0" else ""
sys.stdout.write(next((part for part in script.split("/") if part[:1].isdigit()), "none"))
