"""The machines that a loaded model is divided among."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamado.engine.topology.layout import LayoutPart, LayoutPrediction, Layouts
from llamado.engine.topology.membership import BetweenSteps, JoinedWorker, Membership
from llamado.engine.topology.observer import Mark, Observer
from llamado.engine.topology.view import ClusterView

if TYPE_CHECKING:
    from llamado.engine.forward.device_pool import DevicePool
    from llamado.engine.forward.runner import ModelRunner


class Topology:
    """State, membership and layout of the devices. Callable from any thread; changes take time."""

    def __init__(self, pool: DevicePool, runner: ModelRunner, between_steps: BetweenSteps) -> None:
        self._observer = Observer(pool, runner)
        self._membership = Membership(pool, runner, between_steps)
        self._layouts = Layouts(pool, runner)

    def view(self) -> ClusterView:
        """Return the present state without waiting."""
        return self._observer.view()

    def mark(self) -> Mark:
        """Return a value that changes whenever a device joins or leaves, or layers move; costs next to nothing."""
        return self._observer.mark()

    def predict(self, parts: Sequence[LayoutPart]) -> LayoutPrediction:
        """Predict the memory and time of a layout; measures unknown speeds first. Raises BadLayout."""
        self._layouts.placement(parts)
        self._membership.measure()
        return self._layouts.predict(parts)

    def lay_out(self, parts: Sequence[LayoutPart]) -> None:
        """Move layers and head; running answers pause, and continue with the same bytes. Raises BadLayout; see
        Membership.
        """
        self._membership.lay_out(self._layouts.placement(parts))

    def join(self, endpoint: str, share: float = 1.0, speeds: Sequence[float | None] = ()) -> list[JoinedWorker]:
        """Add a worker (see Membership.join)."""
        return self._membership.join(endpoint, share, speeds)

    def drain(self, endpoint: str) -> None:
        """Remove a worker (see Membership.drain)."""
        self._membership.drain(endpoint)
