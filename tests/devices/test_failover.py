"""Failover of a lost device's layers: within memory, in few runs, and no other device gives up layers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamado.devices.split.failover import replace_lost
from llamado.devices.split.placement import (
    DeviceFigures,
    ModelSizes,
    NotEnoughMemory,
    Placement,
    WeightSize,
    predict,
)
from llamado.ggml.role import ModelPart, Role


def model(n_layer: int, **changes: Any) -> ModelSizes:
    plain: dict[str, Any] = {"layers": (100,) * n_layer, "kv": (10,) * n_layer, "head": 100, "hidden": 1, "logits": 50}
    return ModelSizes(**plain | changes)


def cpu(free: int = 10**9, decode: float | None = 1e4) -> DeviceFigures:
    return DeviceFigures(name="CPU", local=True, free=free, total=10**9, decode=decode)


def rpc(n: int, free: int = 10**9, decode: float | None = 1e4, round_trip: float = 1e-3) -> DeviceFigures:
    return DeviceFigures(
        name=f"RPC{n}[h:{n}]", local=False, free=free, total=10**9, decode=decode, round_trip=round_trip, bandwidth=1e6
    )


def moved(before: Placement, after: Placement, alive: list[int]) -> None:
    """Whatever was on a living device is still there, and nothing is on a dead one."""
    for old, new in zip((*before.layers, before.head), (*after.layers, after.head), strict=True):
        assert new == old if old in alive else new in alive
    assert all(device in alive for _, device in after.overrides)
    assert after.embedding == before.embedding


def test_failover_takes_no_layers_from_other_devices() -> None:
    figures = (cpu(), rpc(0), rpc(1), rpc(2))
    before = Placement((1, 1, 1, 2, 2, 2, 3, 3, 3), 3)
    after = replace_lost(model(9), figures, before, [0, 1, 3])
    moved(before, after, [0, 1, 3])
    assert set(after.layers) <= {1, 3}, "no further round trip for a run of their own"


def test_a_run_between_two_devices_is_divided_for_speed() -> None:
    """Both neighbors get some where that keeps both within memory."""
    sizes = model(6)
    figures = (cpu(free=0), rpc(0, free=350), rpc(1), rpc(2, free=500))
    before = Placement((1, 1, 2, 2, 2, 3), 3)
    after = replace_lost(sizes, figures, before, [1, 3])
    assert after == Placement((1, 1, 1, 3, 3, 3), 3)


def test_the_faster_neighbour_gets_the_run() -> None:
    figures = (cpu(decode=1e3), rpc(0, decode=1e4), rpc(1), rpc(2, decode=4e4))
    after = replace_lost(model(6), figures, Placement((1, 1, 2, 2, 3, 3), 3), [0, 1, 3])
    assert after.layers == (1, 1, 3, 3, 3, 3)


def test_all_workers_are_gone() -> None:
    figures = (cpu(), rpc(0), rpc(1))
    assert replace_lost(model(4), figures, Placement((1, 1, 2, 2), 2), [0]) == Placement((0,) * 4, 0)


def test_the_head_alone() -> None:
    figures = (cpu(decode=1e5), rpc(0), rpc(1))
    after = replace_lost(model(4), figures, Placement((1, 1, 1, 1), 2), [0, 1])
    assert after.layers == (1, 1, 1, 1) and after.head in (0, 1)
    assert after.head == 0, "where it takes least time"


def test_overrides_to_the_lost_device_have_no_effect() -> None:
    ups = [Role(ModelPart.LAYER, f"blk.{i}.ffn_up.weight", i) for i in range(2)]
    sizes = model(2, tensors={up: WeightSize(40, 40) for up in ups})
    figures = (cpu(), rpc(0), rpc(1))
    before = Placement((1, 1), 1, 0, (("blk.0.ffn_up", 2), ("blk.1.ffn_up", 0)))
    after = replace_lost(sizes, figures, before, [0, 1])
    assert after == Placement((1, 1), 1, 0, (("blk.1.ffn_up", 0),))


def test_without_speeds_most_memory_stays_free() -> None:
    """Device figures without measured speeds, as for a placement by proportions."""
    figures = (cpu(free=900, decode=None), rpc(0, free=1500, decode=None), rpc(1, decode=None))
    before = Placement((0, 1, 2, 2), 1)
    after = replace_lost(model(4), figures, before, [0, 1])
    moved(before, after, [0, 1])
    assert after.layers == (0, 1, 1, 1)


def test_missing_memory_is_reported_by_device() -> None:
    figures = (cpu(free=150), rpc(0, free=300), rpc(1))
    with pytest.raises(NotEnoughMemory, match=r"not enough memory: .*missing") as caught:
        replace_lost(model(4), figures, Placement((1, 2, 2, 2), 2), [0, 1])
    assert sum(caught.value.missing.values()) > 0
    assert set(caught.value.missing) <= {"CPU", "RPC0[h:0]"}


def test_layers_are_placed_in_more_runs_if_memory_needs_it() -> None:
    """The devices that are left have no room for a whole run: each takes a part of it."""
    figures = (cpu(free=150), rpc(0, free=270), rpc(1), rpc(2, free=270))
    before = Placement((1, 2, 2, 2, 3), 3)
    after = replace_lost(model(5, head=10), figures, before, [0, 1, 3])
    moved(before, after, [0, 1, 3])
    assert sorted(after.layers) == [0, 1, 1, 3, 3]


def test_a_device_of_unknown_memory_takes_all() -> None:
    silent = DeviceFigures(name="RPC0[h:0]", local=False, free=0, total=0, decode=1e4, round_trip=1e-3)
    after = replace_lost(model(4), (cpu(free=0), silent, rpc(1)), Placement((1, 1, 2, 2), 2), [0, 1])
    assert after == Placement((1,) * 4, 1)


def test_one_after_the_other() -> None:
    figures = (cpu(), *(rpc(i) for i in range(4)))
    placement = Placement((1, 1, 2, 2, 3, 3, 4, 4), 4)
    alive = [0, 1, 2, 3, 4]
    for dead in (3, 1, 4, 2):
        alive.remove(dead)
        before, placement = placement, replace_lost(model(8), figures, placement, alive)
        moved(before, placement, alive)
    assert placement == Placement((0,) * 8, 0)


def cheapest(sizes: ModelSizes, figures: tuple[DeviceFigures, ...], before: Placement, alive: list[int]) -> float:
    """Least seconds per token of all ways to move what is lost, as far as they fit; infinite where none does."""
    items = [*before.layers, before.head]
    lost = [i for i, device in enumerate(items) if device not in alive]
    best = float("inf")
    for choice in itertools.product(alive, repeat=len(lost)):
        for i, device in zip(lost, choice, strict=True):
            items[i] = device
        prediction = predict(sizes, figures, Placement(tuple(items[:-1]), items[-1]))
        shares = zip(prediction.shares, figures, strict=True)
        if all(share.memory <= device.room for share, device in shares):
            best = min(best, prediction.seconds or 0.0)
    return best


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_loss(data: st.DataObject) -> None:
    """Room is found where there is any, and a token does not take much longer than it must."""
    n = data.draw(st.integers(2, 4))
    n_layer = data.draw(st.integers(1, 6))
    rooms = data.draw(st.lists(st.integers(0, 900), min_size=n, max_size=n))
    speeds = data.draw(st.lists(st.sampled_from([1e3, 1e4, 5e4]), min_size=n, max_size=n))
    figures = tuple(
        cpu(rooms[i], speeds[i]) if i == 0 else rpc(i, rooms[i], speeds[i], data.draw(st.sampled_from([0.0, 1e-3])))
        for i in range(n)
    )
    sizes = model(n_layer, compute=data.draw(st.integers(0, 30)))
    cuts = sorted(data.draw(st.lists(st.integers(0, n_layer + 1), min_size=n - 1, max_size=n - 1)))
    items = [sum(i >= cut for cut in cuts) for i in range(n_layer + 1)]
    before = Placement(tuple(items[:-1]), items[-1])
    alive = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True).map(sorted))
    best = cheapest(sizes, figures, before, alive)
    try:
        after = replace_lost(sizes, figures, before, alive)
    except NotEnoughMemory as error:
        assert all(name in {figures[i].name for i in alive} for name in error.missing)
        assert best == float("inf"), "there was room"
        return
    moved(before, after, alive)
    shares = predict(sizes, figures, after).shares
    for i, (share, device) in enumerate(zip(shares, figures, strict=True)):
        assert i not in alive or share.memory <= device.room
    seconds = predict(sizes, figures, after).seconds
    assert seconds is not None and best <= seconds * (1 + 1e-9)
    assert seconds <= 2 * best, "much slower than the best of all ways"
