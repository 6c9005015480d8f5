"""Keeps multicast out of a fabric: sets the variables that turn it off, and refuses an environment that turns it on.

Multicast objects of a fabric manager have failed in public reports in many ways (no device, a stalled bind, a
rendezvous that only some ranks believe in), and no kernel here uses them.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from dcp_decode.errors import UnsupportedEnvironment


def forbid_multicast(environment: MutableMapping[str, str], variables: tuple[str, ...]) -> None:
    """Set each variable to 1, before the library that reads it starts; one that says otherwise is refused."""
    for variable in variables:
        given = environment.setdefault(variable, "1")
        if given != "1":
            raise UnsupportedEnvironment(f"{variable}={given}: multicast is never used, unset it or set it to 1")
