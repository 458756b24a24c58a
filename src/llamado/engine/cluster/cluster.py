"""The machines that a loaded model is divided among."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamado.engine.cluster.membership import BetweenSteps, Joined, Membership
from llamado.engine.cluster.view import ClusterView, Observer

if TYPE_CHECKING:
    from llamado.engine.forward.device_pool import DevicePool
    from llamado.engine.forward.runner import ModelRunner


class Cluster:
    """Who is there and has what, and who comes and goes. Any thread; `join` and `drain` take their time."""

    def __init__(self, pool: DevicePool, runner: ModelRunner, between_steps: BetweenSteps) -> None:
        self._observer = Observer(pool, runner)
        self._membership = Membership(pool, runner, between_steps)

    def view(self) -> ClusterView:
        """As it is now; waits for nothing."""
        return self._observer.view()

    def join(self, endpoint: str, share: float = 1.0, speeds: Sequence[float | None] = ()) -> list[Joined]:
        """See Membership."""
        return self._membership.join(endpoint, share, speeds)

    def drain(self, endpoint: str) -> None:
        """See Membership."""
        self._membership.drain(endpoint)
