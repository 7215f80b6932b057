"""What can go wrong with guests."""

from __future__ import annotations


class GuestError(Exception):
    """A guest could not be built, started or used; the message says why and names the log."""


class MissingPrograms(GuestError):
    """Programs that guests need are not installed; names the packages that have them."""
