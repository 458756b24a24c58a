"""`llamado drain NAME --gateway URL`: drain a replica of a gateway, or resume it."""

from __future__ import annotations

import sys

import httpx

from llamado.client.requests import base, failure, object_of
from llamado.errors import LlamadoError
from llamado.flags import FlagError
from llamado.outgoing import open_client
from llamado.terminal.text import print

_WAIT = 3600
"""Maximum seconds to wait for running requests."""


class DrainError(LlamadoError):
    """The gateway did not drain a replica."""


def drain_replica(url: str, replica: str, admin_key: str | None, *, undo: bool) -> int:
    """Drain a replica and wait until it is idle; `undo`: send it requests again. Return the exit code.

    Raises FlagError, DrainError, ServerUnavailable.
    """
    if not admin_key:
        raise FlagError("--gateway: give the gateway's --admin-key, or LLAMADO_ADMIN_KEY")
    body = {"replica": replica, "drain": not undo, **({} if undo else {"wait": _WAIT})}
    try:
        with open_client(timeout=_WAIT + 10.0) as http:
            answer = http.post(
                f"{base(url)}/gateway/drain", json=body, headers={"Authorization": f"Bearer {admin_key}"}
            )
    except httpx.HTTPError as error:
        raise DrainError(f"{url} cannot be reached: {error or type(error).__name__}") from None
    if answer.status_code != 200:
        raise DrainError(str(failure(answer)))
    left = object_of(answer).get("in_flight")
    if undo:
        print(f"{replica}: resumed")
    elif left:
        print(f"{replica}: {left} requests are still running after {_WAIT} s", file=sys.stderr)
        return 1
    else:
        print(f"{replica}: drained")
    return 0
