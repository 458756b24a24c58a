"""Layer placement: llama.cpp's rule, the fastest placement, memory, names, overrides."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamado.devices.split.placement import (
    ALL_LAYERS,
    DeviceFigures,
    ModelSizes,
    NotEnoughMemory,
    Placement,
    SplitOptions,
    Stage,
    WeightSize,
    check_memory,
    predict,
)
from llamado.devices.split.rules import UnknownDevice, fastest, override, place, selected
from llamado.devices.split.shares import by_memory, by_ratio
from llamado.ggml.role import ModelPart, Role


def model(n_layer: int, **changes: Any) -> ModelSizes:
    plain: dict[str, Any] = {"layers": (100,) * n_layer, "kv": (10,) * n_layer, "head": 100, "hidden": 1, "logits": 50}
    return ModelSizes(**plain | changes)


def cpu(free: int = 10**9, decode: float = 1e4) -> DeviceFigures:
    return DeviceFigures(name="CPU", local=True, free=free, total=10**9, decode=decode)


def rpc(n: int, free: int = 10**9, decode: float = 1e4, round_trip: float = 1e-3) -> DeviceFigures:
    return DeviceFigures(
        name=f"RPC{n}[h:{n}]", local=False, free=free, total=10**9, decode=decode, round_trip=round_trip, bandwidth=1e6
    )


def options(**changes: Any) -> SplitOptions:
    return SplitOptions(rpc=("h:0", "h:1"), **changes)


THREE = (cpu(), rpc(0), rpc(1))
INPUT, SHARED = Role(ModelPart.INPUT, "token_embd.weight"), Role(ModelPart.SHARED, "rope_freqs.weight")
OUTPUT, OUTPUT_NORM = Role(ModelPart.OUTPUT, "output.weight"), Role(ModelPart.OUTPUT, "output_norm.weight")


def of_layer(layer: int, name: str) -> Role:
    return Role(ModelPart.LAYER, f"blk.{layer}.{name}.weight", layer)


def places(placement: Placement) -> list[int]:
    return [*placement.layers, placement.head]


# --- llama.cpp's rule -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_layer", "ratios", "n_gpu_layers", "expected"),
    [
        # what llama-server b11434 logs with --rpc and these flags ("layer N assigned to device")
        (30, (1, 1), None, [1] * 16 + [2] * 15),
        (30, (3, 1), None, [1] * 24 + [2] * 7),
        (30, (1, 3), None, [1] * 8 + [2] * 23),
        (30, (1, 1), 10, [0] * 21 + [1] * 5 + [2] * 5),
        (30, (1, 1), 99, [1] * 16 + [2] * 15),
        (30, (0, 1), None, [2] * 31),
        (30, (1,), None, [1] * 31),
        (30, (1, 1), 0, [0] * 31),
        (30, (1, 1), 1, [0] * 30 + [1]),
        # one more ratio: this machine takes layers too, the last ones, as llama.cpp gives them to a GPU of its own
        (3, (2, 1, 1), None, [1, 1, 2, 0]),
        (3, (0.5, 0.5, 0), None, [1, 1, 2, 2]),
    ],
)
def test_ratios_divide_as_llama_cpp_divides(
    n_layer: int, ratios: tuple[float, ...], n_gpu_layers: int | None, expected: list[int]
) -> None:
    assert places(by_ratio(model(n_layer), THREE, ratios, n_gpu_layers=n_gpu_layers)) == expected
    wanted = options(tensor_split=ratios, n_gpu_layers=n_gpu_layers)
    assert places(place(model(n_layer), THREE, wanted)) == expected


def test_shares_of_missing_devices() -> None:
    with pytest.raises(UnknownDevice) as caught:
        place(model(3), (cpu(), rpc(0)), options(tensor_split=(1, 1, 1, 1)))
    assert str(caught.value).startswith("--tensor-split 1,1,1,1: 4 shares for 2 devices (RPC0[h:0], CPU); give each")
    with pytest.raises(UnknownDevice, match="2 shares for 1 device "):
        place(model(3), THREE, options(tensor_split=(1, 1), devices=("RPC1",)))
    place(model(3), THREE, options(tensor_split=(1, 1), devices=("none",)))  # nothing is shared


def test_free_memory_divides_among_workers_alone() -> None:
    figures = (cpu(), rpc(0, free=3000), rpc(1, free=1000))
    assert places(by_memory(model(7), figures)) == [1] * 6 + [2] * 2
    assert places(place(model(7), figures, options(tensor_split=()))) == [1] * 6 + [2] * 2
    assert places(by_memory(model(3), (cpu(),))) == [0] * 4  # alone
    silent = DeviceFigures(name="RPC1[h:1]", local=False, free=0, total=0)
    assert places(by_memory(model(3), (cpu(1000), rpc(0, free=3000), silent))) == [1, 1, 1, 2]


@pytest.mark.slow
@settings(deadline=None)
@given(
    n_layer=st.integers(1, 120),
    ratios=st.lists(st.floats(0.001, 1000), min_size=1, max_size=8),
    n_gpu_layers=st.one_of(st.none(), st.integers(0, 130)),
)
def test_ratios_are_kept_within_a_layer(n_layer: int, ratios: list[float], n_gpu_layers: int | None) -> None:
    figures = (cpu(), *(rpc(i) for i in range(len(ratios))))
    devices = places(by_ratio(model(n_layer), figures, ratios, n_gpu_layers=n_gpu_layers))
    n = min(n_layer + 1, n_layer + 1 if n_gpu_layers is None else n_gpu_layers)
    assert devices == sorted(devices) and devices.count(0) == n_layer + 1 - n
    for i, ratio in enumerate(ratios, 1):
        assert abs(devices.count(i) - n * ratio / sum(ratios)) < 1.01


# --- the fastest ------------------------------------------------------------------------------------------------------


def test_a_model_that_fits_locally_stays_unless_a_worker_is_faster() -> None:
    assert places(fastest(model(4), THREE)) == [0] * 5
    quick = (cpu(decode=1e3), rpc(0, decode=1e5), rpc(1))
    assert places(fastest(model(4), quick)) == [1] * 5
    far = (cpu(decode=1e3), rpc(0, decode=1e5, round_trip=10.0), rpc(1, round_trip=10.0))
    assert places(fastest(model(4), far)) == [0] * 5


def test_slow_devices_are_left_out_and_full_ones_spill_over() -> None:
    tight = (cpu(free=230), rpc(0, decode=1e2), rpc(1, decode=1e4))
    # 230 bytes here: two layers of 110, or the head and one of them
    assert fastest(model(4), tight).layers.count(0) <= 2
    assert 1 not in places(fastest(model(4), tight))


def test_costly_logit_transfers_keep_the_head_local() -> None:
    figures = (cpu(free=230, decode=1e4), rpc(0, decode=1e6))
    assert fastest(model(4, logits=10**6), figures).head == 0
    assert fastest(model(4, logits=1), figures).head == 1


def test_working_memory_counts() -> None:
    figures = (cpu(free=500), rpc(0, free=500))
    assert fastest(model(4), figures)
    with pytest.raises(NotEnoughMemory):
        fastest(model(4, compute=250), figures)
    with pytest.raises(NotEnoughMemory):
        fastest(model(4, head_compute=500), figures)


def test_layers_that_must_go_to_workers() -> None:
    assert places(fastest(model(4), THREE, n_gpu_layers=ALL_LAYERS)) == [1] * 5
    assert places(fastest(model(4), THREE, n_gpu_layers=2)) == [0, 0, 0, 1, 1]
    assert places(fastest(model(4), THREE, n_gpu_layers=0)) == [0] * 5
    assert places(place(model(4), THREE, options(n_gpu_layers=99, devices=("RPC1",)))) == [2] * 5


SIZES = st.integers(0, 60)


@st.composite
def problems(draw: st.DrawFn, most_layers: int = 4, most_devices: int = 3) -> tuple[ModelSizes, list[DeviceFigures]]:
    n = draw(st.integers(1, most_layers))
    many = st.lists(SIZES, min_size=n, max_size=n)
    sizes = ModelSizes(
        layers=tuple(draw(many)),
        kv=tuple(draw(many)),
        kv_read=tuple(draw(many)),
        head=draw(SIZES),
        hidden=draw(SIZES),
        inputs=draw(SIZES),
        logits=draw(SIZES),
        compute=draw(SIZES),
        head_compute=draw(SIZES),
    )
    figures = []
    for i in range(draw(st.integers(1, most_devices))):
        local = i == 0 and draw(st.booleans())
        free = draw(st.integers(0, 60 * (n + 4)))
        figures.append(
            DeviceFigures(
                name=f"D{i}",
                local=local,
                free=free,
                total=draw(st.sampled_from([0, 1000])),
                decode=draw(st.sampled_from([1.0, 2.0, 10.0, 1000.0])),
                round_trip=0.0 if local else draw(st.sampled_from([0.0, 1.0, 30.0])),
                bandwidth=None if local else draw(st.sampled_from([1.0, 10.0, 1e9])),
                links=not local and draw(st.booleans()),
            )
        )
    return sizes, figures


def every_placement(sizes: ModelSizes, figures: list[DeviceFigures]) -> list[Placement]:
    """All with one run per device in order, and the head behind the last, or on this machine."""
    found = []
    for devices in itertools.combinations_with_replacement(range(len(figures)), sizes.n_layer):
        heads = {*range(devices[-1], len(figures)), *(i for i, device in enumerate(figures) if device.local)}
        found += [Placement(devices, head) for head in heads]
    return found


def fits(sizes: ModelSizes, figures: list[DeviceFigures], placement: Placement) -> bool:
    try:
        check_memory(sizes, figures, placement)
    except NotEnoughMemory:
        return False
    return True


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(problems())
def test_the_fastest_is_the_best_of_all(problem: tuple[ModelSizes, list[DeviceFigures]]) -> None:
    sizes, figures = problem
    best = math.inf
    for placement in every_placement(sizes, figures):
        if fits(sizes, figures, placement):
            best = min(best, predict(sizes, figures, placement).seconds or 0.0)
    if best == math.inf:
        with pytest.raises(NotEnoughMemory) as error:
            fastest(sizes, figures)
        assert error.value.missing
        return
    found = fastest(sizes, figures)
    assert fits(sizes, figures, found)
    assert predict(sizes, figures, found).seconds == pytest.approx(best)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(most_layers=60, most_devices=8), st.one_of(st.none(), st.integers(0, 70)))
def test_the_fastest_is_never_worse_than_other_rules(
    problem: tuple[ModelSizes, list[DeviceFigures]], n_gpu_layers: int | None
) -> None:
    sizes, figures = problem
    # With a number of layers for the workers, this machine has no share in them.
    shares = [1.0] * (8 if n_gpu_layers is None else sum(not device.local for device in figures))
    others = [by_memory(sizes, figures, None, n_gpu_layers), by_ratio(sizes, figures, shares, None, n_gpu_layers)]
    if n_gpu_layers is not None and not any(device.local for device in figures):
        return  # there is no place for the layers before
    fitting = [other for other in others if fits(sizes, figures, other)]
    try:
        found = fastest(sizes, figures, None, n_gpu_layers)
    except NotEnoughMemory as error:
        assert not fitting, error
        return
    assert fits(sizes, figures, found)
    for other in fitting:
        seconds = predict(sizes, figures, other).seconds
        assert seconds is not None and (predict(sizes, figures, found).seconds or 0.0) <= seconds * (1 + 1e-9)


def test_large_placements_finish() -> None:
    sizes = model(100, layers=tuple(range(50, 150)))
    figures = [cpu(free=900), *(rpc(i, free=500 + 20 * i, decode=1e4 * (i + 1)) for i in range(1, 16))]
    with pytest.raises(NotEnoughMemory):
        fastest(sizes, figures)
    figures = [cpu(free=2000), *(rpc(i, free=1500, decode=1e4 * (i + 1)) for i in range(1, 16))]
    placement = fastest(sizes, figures)
    check_memory(sizes, figures, placement)
    assert len(placement.layers) == 100 and len(placement.stages) <= 17


def test_speeds_must_be_known() -> None:
    with pytest.raises(ValueError, match="speed of RPC0"):
        fastest(model(2), (DeviceFigures(name="RPC0", local=False, free=10**6, total=10**6),))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_missing_memory_names_the_device() -> None:
    mib = 1 << 20
    sizes = model(4, layers=(100 * mib,) * 4, kv=(20 * mib,) * 4, head=50 * mib, compute=8 * mib)
    figures = (cpu(), rpc(0, free=200 * mib), rpc(1, free=1000 * mib))
    with pytest.raises(NotEnoughMemory) as error:
        place(sizes, figures, options(tensor_split=(1, 1)))
    message = str(error.value)
    assert "RPC0[h:0] needs 368 MiB (weights 300 MiB, K/V cache 60 MiB, compute 8.0 MiB)" in message
    assert "168 MiB missing" in message and "RPC1" not in message
    assert error.value.missing == {"RPC0[h:0]": 168 * mib}


def test_nothing_fits_anywhere() -> None:
    figures = (cpu(free=100), rpc(0, free=100))
    with pytest.raises(NotEnoughMemory) as error:
        place(model(4), figures, options())
    assert set(error.value.missing) == {"CPU", "RPC0[h:0]"}
    # in the sum there is room, in none of the pieces
    many = tuple(rpc(i, free=109) for i in range(9))
    with pytest.raises(NotEnoughMemory):
        place(model(4), many, options())


def test_devices_of_unknown_memory_take_all() -> None:
    silent = DeviceFigures(name="RPC0[h:0]", local=False, free=0, total=0, decode=1e4, bandwidth=1e6)
    assert places(fastest(model(4), (cpu(free=0), silent))) == [1] * 5


# --- what a placement says --------------------------------------------------------------------------------------------


def test_weights_are_found_by_role() -> None:
    placement = Placement((1, 1, 2), 2, 0, ((r"blk\.0\.ffn_(up|gate)", 2), ("norm", 0), ("embd", 1)))
    expected = {
        of_layer(0, "attn_q"): 1,
        of_layer(0, "ffn_up"): 2,
        of_layer(2, "attn_q"): 2,
        of_layer(2, "attn_norm"): 0,
        OUTPUT: 2,
        OUTPUT_NORM: 0,
        INPUT: 0,  # wherever patterns want it
        SHARED: 0,
    }
    assert {role: placement.device_of(role) for role in expected} == expected
    assert placement.devices == (0, 1, 2)
    # The name says nothing: a part that is called otherwise is placed alike.
    assert placement.device_of(Role(ModelPart.LAYER, "encoder.q", 2)) == 2
    assert placement.device_of(Role(ModelPart.OUTPUT, "cls.weight")) == 2


def test_an_operation_finds_a_weight_in_the_role_it_uses() -> None:
    placement = Placement((1, 1, 2), 2, 0)
    tied = (INPUT, OUTPUT)
    assert (placement.home(tied, rows=True), placement.home(tied, rows=False)) == (0, 2)
    assert placement.home((OUTPUT, INPUT), rows=True) == 0
    assert placement.home((INPUT,), rows=False) == 0  # the second matrix of its adapter
    assert placement.home((of_layer(1, "x"),), rows=True) == 1
    assert placement.home((SHARED,), rows=False) is None


def test_stages_are_runs() -> None:
    assert Placement((1, 1, 2), 2).stages == (Stage(1, 0, 2, False), Stage(2, 2, 3, True))
    assert Placement((1, 1), 0).stages == (Stage(1, 0, 2, False), Stage(0, 2, 2, True))
    assert Placement((0,), 0).stages == (Stage(0, 0, 1, True),)
    assert Placement((0, 1, 0), 0).stages == (Stage(0, 0, 1, False), Stage(1, 1, 2, False), Stage(0, 2, 3, True))
    assert Placement((1, 2), 2) == Placement((1, 2), 2) != Placement((1, 2), 2, 1)


def test_prediction_adds_up() -> None:
    sizes = model(4, kv_read=(5,) * 4, inputs=3, compute=7, head_compute=2)
    figures = (cpu(decode=100.0), rpc(0, decode=1000.0), rpc(1, decode=500.0))
    prediction = predict(sizes, figures, Placement((0, 1, 1, 2), 2))
    here, one, two = prediction.shares
    assert (here.layers, one.layers, two.layers, two.head) == ((0,), (1, 2), (3,), True)
    assert (here.memory, one.memory, two.memory) == (100 + 10 + 7, 200 + 20 + 7, 200 + 10 + 9)
    assert (here.seconds, one.seconds, two.seconds) == (1.05, 0.21, 0.41)
    assert (here.link_seconds, one.link_seconds) == (0.0, pytest.approx(1e-3 + 5e-6))
    assert two.link_seconds == pytest.approx(1e-3 + (1 + 3 + 50) / 1e6)
    assert prediction.seconds == pytest.approx(1.05 + 0.21 + 0.41 + 2e-3 + 59e-6)
    unknown = (cpu(), DeviceFigures(name="RPC0", local=False, free=10**6, total=10**6))
    assert predict(sizes, unknown, Placement((0, 1, 1, 1), 1)).seconds is None
    assert predict(sizes, unknown, Placement((0,) * 4, 0)).seconds is not None  # what does nothing needs no speed


def experts(n: int, used: int) -> Role:
    return Role(ModelPart.LAYER, "blk.0.ffn_up_exps.weight", 0, n, used)


def test_a_token_reads_its_experts_and_its_row_of_the_embedding() -> None:
    assert experts(8, 2).bytes_read(4000, 10) == 1000
    assert experts(128, 8).bytes_read(128 * 33, 10) == 8 * 33
    assert of_layer(0, "ffn_up").bytes_read(4000, 10) == 4000
    assert OUTPUT.bytes_read(4000, 10) == 4000
    assert INPUT.bytes_read(4000, 10) == 10
    assert SHARED.bytes_read(16, 16) == 16


def test_time_goes_by_bytes_read_and_memory_by_bytes_held() -> None:
    whole = model(4, embedding=1000)
    mixture = model(4, layers_read=(30,) * 4, embedding=1000, embedding_read=8)
    figures = (cpu(decode=100.0), rpc(0, decode=100.0))
    placement = Placement((0, 0, 1, 1), 1)
    here, there = predict(mixture, figures, placement).shares
    assert (here.seconds, there.seconds) == (pytest.approx(0.6 + 0.08), pytest.approx(0.6 + 1.0))
    assert [share.weights for share in (here, there)] == [
        share.weights for share in predict(whole, figures, placement).shares
    ]
    assert predict(whole, figures, placement).shares[0].seconds == 2.0


def test_the_fastest_placement_of_a_mixture_goes_by_what_is_read() -> None:
    """If unused experts are not counted, reading locally is faster than the round trip."""
    figures = (cpu(decode=1e4), rpc(0, decode=1e6, round_trip=0.02))
    assert places(fastest(model(4), figures)) == [1] * 5
    mixture = model(4, layers_read=(2,) * 4)
    assert places(fastest(mixture, figures)) == [0] * 5
    # It takes the room of all of its experts all the same.
    with pytest.raises(NotEnoughMemory):
        fastest(mixture, (cpu(free=300),))


def test_overridden_experts_move_their_read_costs() -> None:
    sizes = model(
        1, layers_read=(55,), tensors={experts(8, 2): WeightSize(60, 15), of_layer(0, "attn"): WeightSize(40, 40)}
    )
    placement = place(
        sizes, (cpu(decode=1.0), rpc(0, decode=1.0)), options(tensor_split=(1,), overrides=(("exps", "CPU"),))
    )
    here, there = predict(sizes, (cpu(decode=1.0), rpc(0, decode=1.0)), placement).shares
    assert (here.weights, there.weights) == (60, 40 + 100)
    assert (here.seconds, there.seconds) == (15.0, 40.0 + 100.0)


# --- choosing devices -------------------------------------------------------------------------------------------------


def test_devices_by_their_names() -> None:
    figures = (cpu(), rpc(0), rpc(1), DeviceFigures(name="RPC2[h:1]", local=False, free=1, total=1))
    assert selected(figures, ("RPC1",)) == (2,)
    assert selected(figures, ("rpc0[h:0]", "cpu")) == (1, 0)
    assert selected(figures, ("h:1", "RPC1")) == (2, 3)  # all devices of a worker, each once
    assert selected(figures, ("none",)) == ()
    with pytest.raises(UnknownDevice, match=r"'CUDA0'; there are CPU, RPC0\[h:0\]"):
        selected(figures, ("CUDA0",))


def test_chosen_devices_take_layers_in_their_order() -> None:
    assert places(place(model(3), THREE, options(tensor_split=(1, 1), devices=("RPC1", "CPU")))) == [2, 2, 0, 0]
    assert places(place(model(3), THREE, options(tensor_split=(), devices=("RPC1",)))) == [2] * 4
    assert places(place(model(3), THREE, options(devices=("none",)))) == [0] * 4
    assert places(place(model(3), THREE, options(tensor_split=(), devices=("none",)))) == [0] * 4
    with pytest.raises(UnknownDevice):
        place(model(3), THREE, options(devices=("CUDA0",)))


def test_devices_left_take_over() -> None:
    assert places(place(model(3), THREE, options(tensor_split=(3, 1)), among=(0, 2))) == [2] * 4
    assert places(place(model(3), THREE, options(tensor_split=(2, 1, 1)), among=(0, 2))) == [2, 2, 0, 0]
    assert places(place(model(3), THREE, options(tensor_split=(1, 0)), among=(0, 2))) == [2] * 4
    assert places(place(model(3), THREE, options(tensor_split=(1, 1)), among=(0,))) == [0] * 4
    assert places(place(model(3), THREE, options(devices=("RPC0",)), among=(0, 2))) == [0] * 4
    assert 1 not in places(place(model(3), THREE, options(n_gpu_layers=99), among=(0, 2)))
    away = options(tensor_split=(1, 1), overrides=(("ffn", "RPC0"),))
    assert place(named(3), THREE, away, among=(0, 2)).overrides == ()
    with pytest.raises(NotEnoughMemory):
        place(model(3), (cpu(), rpc(0), rpc(1, free=10)), options(tensor_split=(3, 1)), among=(0, 2))


# --- overrides --------------------------------------------------------------------------------------------------------


def named(n_layer: int) -> ModelSizes:
    """Layers of two weights."""
    bytes_of = {of_layer(i, name): size for i in range(n_layer) for name, size in (("attn", 40), ("ffn", 60))}
    bytes_of |= {OUTPUT: 90, OUTPUT_NORM: 10}
    return model(n_layer, tensors={role: WeightSize(size, size) for role, size in bytes_of.items()})


def test_overrides_move_single_weights() -> None:
    wanted = options(tensor_split=(1, 1), overrides=((r"blk\.0\.ffn", "CPU"), ("ffn", "h:1")))
    placement = place(named(3), THREE, wanted)
    assert placement.layers == (1, 1, 2) and placement.device_of(of_layer(0, "ffn")) == 0
    assert placement.device_of(of_layer(1, "ffn")) == 2 and placement.device_of(of_layer(1, "attn")) == 1
    shares = predict(named(3), THREE, placement).shares
    assert [share.weights for share in shares] == [60, 80, 260]
    plain = predict(named(3), THREE, Placement(placement.layers, placement.head))
    assert (predict(named(3), THREE, placement).seconds or 0) > (plain.seconds or 0)


def test_overrides_of_whole_layers_move_the_layer_and_its_cache() -> None:
    wanted = options(tensor_split=(1, 1), overrides=((r"blk\.0\.", "CPU"), ("output", "RPC0")))
    placement = place(named(3), THREE, wanted)
    assert placement == Placement((0, 1, 2), 1)
    assert override(named(3), Placement((1, 1, 2), 2), []) == Placement((1, 1, 2), 2)


def test_overrides_count_in_memory_and_know_the_devices() -> None:
    with pytest.raises(NotEnoughMemory):
        place(named(3), (cpu(), rpc(0, free=250), rpc(1)), options(tensor_split=(1, 1), overrides=(("ffn", "RPC0"),)))
    with pytest.raises(UnknownDevice, match="CUDA0"):
        place(named(3), THREE, options(tensor_split=(1, 1), overrides=(("ffn", "CUDA0"),)))
