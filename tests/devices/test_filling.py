"""The rule of graphics cards: what goes to them, what stays with the CPU, and the reasons that are logged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llamado.devices.split.explain import holdings, idle
from llamado.devices.split.failover import replace_lost
from llamado.devices.split.placement import (
    DeviceFigures,
    ModelSizes,
    NotEnoughMemory,
    Placement,
    SplitOptions,
    WeightSize,
    describe_layers,
    fits,
    predict,
)
from llamado.devices.split.rules import UnknownDevice, place
from llamado.ggml.role import ModelPart, Role

LOCAL = SplitOptions(gpus=True, joins=False)
N = 8


def model(**changes: Any) -> ModelSizes:
    plain: dict[str, Any] = {"layers": (100,) * N, "kv": (10,) * N, "head": 50, "hidden": 1, "logits": 50, "compute": 5}
    return ModelSizes(**plain | changes)


def mixture() -> ModelSizes:
    """Eighty of a layer's hundred bytes are experts."""
    tensors = {Role(ModelPart.OUTPUT, "output.weight"): WeightSize(50, 50)}
    for i in range(N):
        tensors[Role(ModelPart.LAYER, f"blk.{i}.ffn_up_exps.weight", i, 8, 2)] = WeightSize(80, 20)
        tensors[Role(ModelPart.LAYER, f"blk.{i}.attn_q.weight", i)] = WeightSize(20, 20)
    return model(tensors=tensors)


def cpu(free: int = 10**6) -> DeviceFigures:
    return DeviceFigures(name="CPU", local=True, free=free, total=10**6)


def card(n: int, free: int, **more: Any) -> DeviceFigures:
    return DeviceFigures(name=f"CUDA{n}", local=False, accelerator=True, free=free, total=10**6, **more)


def worker(n: int, **more: Any) -> DeviceFigures:
    return DeviceFigures(name=f"RPC{n}[h:{n}]", local=False, free=10**6, total=10**6, **more)


def items(placement: Placement) -> list[int]:
    return [*placement.layers, placement.head]


def placed(sizes: ModelSizes, *figures: DeviceFigures, **options: Any) -> list[int]:
    return items(place(sizes, figures, replace(LOCAL, **options)))


def texts(sizes: ModelSizes, *figures: DeviceFigures, **options: Any) -> dict[str, str]:
    split = replace(LOCAL, **options)
    placement = place(sizes, figures, split)
    found = holdings(sizes, figures, split, placement) | idle(sizes, figures, split, placement)
    return {figures[number].name: text for number, text in found.items()}


@pytest.mark.parametrize(
    ("frees", "expected"),
    [
        ((935,), [1] * 9),  # layers, caches, head and working memory
        ((934,), [0] + [1] * 8),
        ((600, 600), [1] * 5 + [2] * 4),  # by free memory, as llama.cpp divides
        ((1200, 300), [1] * 8 + [2]),
        ((500, 300), [0] * 2 + [1] * 4 + [2] * 3),
        ((20, 600), [0] * 4 + [2] * 5),
        ((600, 20), [0] * 4 + [1] * 5),  # the head goes to the last card with room for it
        ((54,), [0] * 9),
        ((55,), [0] * 8 + [1]),
        ((), [0] * 9),
    ],
)
def test_cards_get_what_fits(frees: tuple[int, ...], expected: list[int]) -> None:
    figures = (cpu(), *(card(i, free) for i, free in enumerate(frees)))
    assert placed(model(), *figures) == expected
    assert fits(model(), figures, place(model(), figures, LOCAL))


def test_the_number_of_layers_is_kept_or_refused() -> None:
    one = cpu(), card(0, 500)
    for n in range(6):
        assert placed(model(), *one, n_gpu_layers=n).count(1) == n
    for n in (6, 9, 99):
        with pytest.raises(NotEnoughMemory, match=r"CUDA0 needs .* What helps: -ngl 5 \(the most that fits\)"):
            placed(model(), *one, n_gpu_layers=n)
    with pytest.raises(NotEnoughMemory, match="CPU needs"):
        placed(model(), cpu(100), card(0, 500))


def test_chosen_cards_take_layers_in_their_order() -> None:
    two = cpu(), card(0, 2000), card(1, 2000)
    assert placed(model(), *two, devices=("CUDA1", "CUDA0")) == [2] * 5 + [1] * 4
    assert placed(model(), *two, devices=("cuda1",)) == placed(model(), *two, main_gpu=1) == [2] * 9
    assert placed(model(), *two, devices=("none",)) == placed(model(), *two, devices=("CPU",)) == [0] * 9
    with pytest.raises(UnknownDevice, match="counted from 0 in CUDA0, CUDA1"):
        placed(model(), *two, main_gpu=2)


def test_workers_come_before_cards() -> None:
    """In shares and in `--main-gpu`, as in llama.cpp; the CPU comes last."""
    three = cpu(), card(0, 2000), worker(0)
    assert placed(model(), *three, tensor_split=(1, 2)) == [2] * 3 + [1] * 6
    assert placed(model(), *three, tensor_split=(1, 1, 1)) == [2] * 3 + [1] * 3 + [0] * 3
    assert placed(model(), *three, main_gpu=0, tensor_split=()) == [2] * 9
    assert placed(model(), *three, main_gpu=1) == [1] * 9
    fast = [replace(one, decode=decode) for one, decode in zip(three, (1e3, 1e6, 1e4), strict=True)]
    fast[1:] = [replace(one, round_trip=trip, bandwidth=1e9) for one, trip in zip(fast[1:], (1e-5, 1e-3), strict=True)]
    assert placed(model(), *fast) == [1] * 9, "with workers the least time counts"


def test_experts_stay_with_the_cpu_if_there_is_no_room() -> None:
    figures = cpu(), card(0, 600)
    placement = place(mixture(), figures, LOCAL)
    assert items(placement) == [1] * 9 and len(placement.overrides) == 1
    share = predict(mixture(), figures, placement).shares
    assert (share[0].weights, share[1].weights) == (5 * 80, 3 * 80 + 8 * 20 + 50) and share[1].memory <= 600
    assert texts(mixture(), *figures)["CPU"].startswith("experts of layers 0 to 4 (")
    assert not place(mixture(), (cpu(), card(0, 935)), LOCAL).overrides
    by_user = place(mixture(), figures, replace(LOCAL, overrides=((r"blk\.[0-6]\..*exps", "CPU"),)))
    assert by_user.overrides == ((r"blk\.[0-6]\..*exps", 0),) and items(by_user) == [1] * 9
    by_user = place(mixture(), figures, replace(LOCAL, overrides=((r"blk\.7\..*exps", "CPU"),)))
    assert by_user.overrides == ((r"blk\.7\..*exps", 0),), "the user's choice counts, so that layers give way"
    assert items(by_user) == [0] * 3 + [1] * 6


def test_a_card_too_small_for_a_mixture_takes_layers_without_experts() -> None:
    placement = place(mixture(), (cpu(), card(0, 200)), LOCAL)
    assert items(placement) == [0] * 4 + [1] * 5 and len(placement.overrides) == 1
    assert predict(mixture(), (cpu(), card(0, 200)), placement).shares[1].weights == 4 * 20 + 50


def test_layers_that_a_card_cannot_run_go_to_the_cpu() -> None:
    lacks = {3: "SSM_SCAN for F32", 4: "SSM_SCAN for F32"}
    figures = cpu(), card(0, 2000, lacks=lacks)
    assert placed(model(), *figures) == placed(model(), *figures, n_gpu_layers=9) == [1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert placed(model(), *figures, tensor_split=(1,)) == [1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert texts(model(), *figures)["CPU"].endswith(": CUDA0 has no SSM_SCAN for F32, which layers 3 to 4 need")
    assert placed(model(), cpu(), card(0, 715, lacks=lacks)) == [1, 1, 1, 0, 0, 1, 1, 1, 1], "they need no room there"
    assert placed(model(), cpu(), card(0, 600, lacks=lacks)) == [0, 0, 1, 0, 0, 1, 1, 1, 1]
    head = card(0, 2000, lacks={N: "MUL_MAT for Q6_K"})
    assert placed(model(), cpu(), head) == [1] * 8 + [0]
    assert texts(model(), cpu(), head)["CPU"].endswith("CUDA0 has no MUL_MAT for Q6_K, which the head needs")
    nothing = card(0, 2000, lacks=dict.fromkeys(range(N + 1), "MUL_MAT for Q6_K"))
    assert texts(model(), cpu(), nothing)["CUDA0"] == "it has no MUL_MAT for Q6_K"


def test_the_cache_of_all_layers_with_the_cpu() -> None:
    figures = cpu(), card(0, 855)
    placement = place(model(), figures, replace(LOCAL, kv_offload=False))
    assert items(placement) == [1] * 9 and placement.cache == 0 and placement.devices == (0, 1)
    here, there = predict(model(), figures, placement).shares
    assert (here.kv, here.weights, here.compute, there.kv) == (80, 0, 5, 0)
    found = texts(model(), *figures, kv_offload=False)
    assert found["CPU"].startswith("the K/V cache of all layers (") and found["CPU"].endswith(
        ": --no-kv-offload keeps the K/V cache here"
    )


def test_reasons() -> None:
    whole = texts(model(), cpu(), card(0, 2000))
    assert whole["CPU"] == "the embedding alone: everything fits CUDA0"
    assert whole["CUDA0"].startswith("everything, layers 0 to 7 and the head (") and "as much" not in whole["CUDA0"]
    part = texts(model(), cpu(), card(0, 500), card(1, 20))
    assert part["CPU"].endswith(": CUDA0 and CUDA1 have no room for it")
    assert "): as much as fits: " in part["CUDA0"] and part["CUDA1"].startswith("a layer takes")
    assert texts(model(), cpu(), card(0, 2000), n_gpu_layers=3)["CPU"].endswith("on this machine")
    single = texts(model(), cpu(), card(0, 2000), card(1, 2000), main_gpu=1)
    assert single["CUDA0"] == "--split-mode none takes one device, --main-gpu 1"
    assert describe_layers([0, 1, 2, 5]) == "layers 0 to 2 and 5" and describe_layers([4]) == "layer 4"


def test_layers_of_a_lost_card() -> None:
    """They go to the other card as far as it has room, the rest to the CPU, although that has more free memory."""
    figures = cpu(), card(0, 500), card(1, 600)
    before = place(model(), figures, LOCAL)
    assert items(before) == [1] * 4 + [2] * 5
    after = replace_lost(model(), figures, before, [0, 2])
    assert items(after) == [0] * 4 + [2] * 5
    roomy = replace(figures[2], free=830)
    assert items(replace_lost(model(), (*figures[:2], roomy), before, [0, 2])) == [0] + [2] * 8
    assert items(replace_lost(model(), figures, before, [0])) == [0] * 9
    cannot = replace(roomy, lacks={1: "SOFT_MAX for F32"})
    assert items(replace_lost(model(), (*figures[:2], cannot), before, [0, 2])).count(0) == 2
