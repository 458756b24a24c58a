"""Workers that join and leave a running server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llamado.devices.split.placement import MAX_SHARE, Placement, check_memory, describe_parts
from llamado.errors import LlamadoError

if TYPE_CHECKING:
    from llamado.devices.device import Device
    from llamado.engine.forward.device_pool import DevicePool
    from llamado.engine.forward.device_tensors import Own
    from llamado.engine.forward.runner import ModelRunner

log = logging.getLogger(__name__)


class BetweenSteps(Protocol):
    """Signature of Engine.between_steps."""

    def __call__(self, work: Callable[[], None], *, forget: bool) -> None: ...


class UnknownWorker(LlamadoError):
    """The worker to be removed is not one of this server's."""


class BadShare(LlamadoError):
    """The share of layers that a joining worker requests is out of range."""


class JoinedWorker(NamedTuple):
    """The part of a worker that joined."""

    device: str
    holds: str
    """A description; if it is "nothing", see `why`."""
    why: str = ""


class Membership:
    """Lets workers join and leave, one at a time; `between_steps` is Engine.between_steps.

    Weights are sent while answers continue. Only then everything stops for a moment, and sequences are read again.
    """

    def __init__(self, pool: DevicePool, runner: ModelRunner, between_steps: BetweenSteps) -> None:
        self._pool, self._runner, self._between_steps = pool, runner, between_steps
        self._recovery = runner.recovery
        self._turn = threading.Lock()

    def join(self, endpoint: str, share: float = 1.0, speeds: Sequence[float | None] = ()) -> list[JoinedWorker]:
        """Add a worker and send it its part; do nothing if it is a member already.

        `share` counts if --tensor-split has proportions; `speeds`: bytes of weights per second that its devices read.
        Raises a LlamadoError; everything is unchanged then.
        """
        if not 0.0 <= share <= MAX_SHARE:
            raise BadShare(f"{endpoint} asks for a share of {share:g}: expected a number from 0 to {MAX_SHARE:g}")
        with self._turn:
            if joined := self._present(endpoint):
                return joined
        found = self._pool.reach(endpoint, speeds)  # outside of the lock: the worker may be frozen
        with self._turn:
            if joined := self._present(endpoint):
                for device, _ in found:
                    device.close()
                return joined
            if numbers := self._places(endpoint):  # it was lost while it had nothing
                self._pool.take_away(endpoint, numbers)
            new = self._pool.add(endpoint, share, found)
            names = " and ".join(device.name for device in new.values())
            try:
                placement = self._pool.plan(self._members(new))
                sent = self._recovery.send_ahead(placement, new)
                self._change(placement, new, (), sent)
            except BaseException:
                self._pool.take_away(endpoint, [*new])
                for device in new.values():
                    device.close()
                raise
            log.info("%s: joined", names)
            for number, device in new.items():
                self._recovery.events.add(
                    "joined", device.name, f"it has {describe_parts(placement).get(number, 'nothing')}"
                )
            self._pool.log_placement(placement)
            return self._joined([*new])

    def drain(self, endpoint: str) -> None:
        """Move a worker's part to the others and remove it.

        Raises UnknownWorker, NotEnoughMemory if the others have no room, or another LlamadoError; everything is
        unchanged then.
        """
        with self._turn:
            numbers = self._places(endpoint)
            if not numbers:
                raise UnknownWorker(f"{endpoint} is not a worker of this server")
            names = " and ".join(self._pool.figures[number].name for number in numbers)
            placement = self._pool.plan([number for number in self._members() if number not in numbers])
            sent = self._recovery.send_ahead(placement, {})
            self._change(placement, {}, numbers, sent)
            self._pool.take_away(endpoint, numbers)
            log.info("%s: drained, holds nothing any more", names)
            for number in numbers:
                self._recovery.events.add("drained", self._pool.figures[number].name, "its layers are elsewhere")
            self._pool.log_placement(placement)

    # -- layouts -------------------------------------------------------------------------------------------------------

    def lay_out(self, placement: Placement) -> None:
        """Move layers and head to a placement; do nothing if it is the present one.

        Raises NotEnoughMemory, DeviceLost for a device that is gone, or another LlamadoError; everything is unchanged
        then.
        """
        with self._turn:
            check_memory(self._pool.fit.sizes, self._pool.figures, placement)
            for number in placement.devices:
                if (lost := self._runner.devices[number].lost) is not None:
                    raise lost
            if placement == self._runner.placement:
                return
            sent = self._recovery.send_ahead(placement, {})
            self._change(placement, {}, (), sent)
            self._pool.by_hand = placement
            log.info("layers: new layout in use")
            self._pool.log_placement(placement)

    def measure(self) -> None:
        """Measure the unknown speeds. Answers wait meanwhile, up to two seconds, once."""
        with self._turn:
            if all(self._runner.devices[n].lost is not None for n in self._pool.unmeasured):
                return
            self._between_steps(lambda: self._recovery.alone(self._pool.measure), forget=False)

    # --- members ------------------------------------------------------------------------------------------------------

    def _change(
        self, placement: Placement, new: Mapping[int, Device], left: Sequence[int], sent: Sequence[Own]
    ) -> None:
        self._between_steps(
            lambda: self._recovery.change(placement, new, left, sent), forget=placement != self._runner.placement
        )
        self._runner.times.forget()

    def _members(self, new: Collection[int] = ()) -> list[int]:
        """Return the numbers of devices that layers may go to: `new` ones, those alive, and those expected back."""
        return [number for number in self._pool.members if number in new or self._belongs(number)]

    def _belongs(self, number: int) -> bool:
        """Return True if a device is alive, or has a part and is expected back."""
        device = self._runner.devices[number]
        away = {gone.device for gone in self._runner.recovery.away()}
        placement = self._runner.placement
        return device.lost is None or device.name in away or (placement is not None and number in placement.devices)

    def _present(self, endpoint: str) -> list[JoinedWorker]:
        """Return the parts of a worker that is a member already, else an empty list."""
        numbers = self._places(endpoint)
        return self._joined(numbers) if any(self._belongs(number) for number in numbers) else []

    def _places(self, endpoint: str) -> list[int]:
        """Return the numbers of a worker's devices."""
        return [n for n in self._pool.members if str(self._runner.devices[n].endpoint) == endpoint]

    def _joined(self, numbers: Sequence[int]) -> list[JoinedWorker]:
        placement = self._runner.placement
        assert placement is not None
        words, idle = describe_parts(placement), self._pool.idle(placement)
        return [
            JoinedWorker(self._pool.figures[n].name, words.get(n, "nothing"), "" if n in words else idle.get(n, ""))
            for n in numbers
        ]
