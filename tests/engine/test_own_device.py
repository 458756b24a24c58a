"""The whole engine on devices of a foreign kind, known only by the `Device` protocol."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from own_device import OwnBackend, OwnDevice, Place
from tiny_models import make_llama

from llamado.devices import registry
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import Device, DeviceError, DeviceLost
from llamado.devices.split.placement import SplitOptions
from llamado.engine.forward.contract import ForwardError
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions
from llamado.ggml.ops import Op
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import load_model
from llamado.models.memory import Span
from llamado.rpc.client.device import RemoteDevice
from llamado.text.tokenizer.tokenizer import load_tokenizer

PROMPTS = ("Hello world", "The quick brown fox", "1 2 3 4")
SPLIT = SplitOptions(rpc=("a", "b"), tensor_split=(1.0, 1.0), n_gpu_layers=99)


@pytest.fixture(autouse=True)
def few_graphs_ahead() -> None:
    """Prepare as many graphs as a server does."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    return make_llama(folder / "m.gguf", n_embd=64, n_ff=64, n_layer=3, n_vocab=320)


@pytest.fixture(scope="module")
def right(path: Path) -> list[list[int]]:
    """Return the tokens computed by `CpuDevice`."""
    with LoadedModel.load(path, options()) as llama:
        return [answer(llama, prompt) for prompt in PROMPTS]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OwnDevice]]:
    """Register the test's backend in place of ours, and return the devices that it makes."""
    monkeypatch.setattr(registry, "_LOCAL_KINDS", {"cpu": "own_device:OwnBackend"})
    monkeypatch.setattr(registry, "_REMOTE_KINDS", {"rpc": "own_device:OwnBackend"})
    for kind in (CpuDevice, RemoteDevice):
        monkeypatch.setattr(kind, "__init__", lambda *_, **__: pytest.fail("a device of our own"))
    monkeypatch.setattr(OwnBackend, "made", [], raising=False)
    yield OwnBackend.made
    assert all(device.closed for device in OwnBackend.made)


def options(split: SplitOptions | None = None) -> EngineOptions:
    return EngineOptions(
        n_ctx=384, n_slots=3, n_batch=32, n_ubatch=32, n_threads=1, split=split, mlock=split is None,
        drafts=DraftOptions(kinds=()),  # steps are counted below
    )  # fmt: skip


def answer(llama: LoadedModel, prompt: str) -> list[int]:
    return [*llama.complete(prompt, n_predict=10, temperature=0.0, ignore_eos=True).tokens]


def at_once(llama: LoadedModel, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """Return the answers of several concurrent requests."""
    found: dict[str, list[int]] = {}
    threads = [
        threading.Thread(target=lambda prompt=prompt: found.update({prompt: answer(llama, prompt)}))
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[prompt] for prompt in prompts]


def members(kind: type) -> dict[str, tuple[str, ...]]:
    """Return the public members of a class, also inherited ones, with the parameters of its methods."""
    names = {name for base in kind.__mro__[:-1] for name in (*vars(base), *vars(base).get("__annotations__", {}))}
    return {
        name: tuple(inspect.signature(found).parameters) if inspect.isfunction(found) else ()
        for name in names
        if not name.startswith("_")
        for found in [inspect.getattr_static(kind, name, None)]
    }


def test_devices_implement_the_protocol() -> None:
    """The test's device and ours have every member with the same parameters; the test's has no base class."""
    assert OwnDevice.__bases__ == (object,)
    contract = members(Device)
    assert len(contract) > 20
    ours = CpuDevice(1)
    for kind, made in ((OwnDevice, OwnDevice("x")), (CpuDevice, ours), (RemoteDevice, None)):
        offered = members(kind)
        for name, parameters in contract.items():
            if parameters:
                assert offered[name] == parameters, f"{kind.__name__}.{name}"
            else:
                assert made is None or hasattr(made, name), f"{kind.__name__} has no {name}"
    ours.close()


def test_backends_implement_the_protocol() -> None:
    for path in (registry._LOCAL_KINDS | registry._REMOTE_KINDS).values():
        module, _, name = path.partition(":")
        offered = members(getattr(import_module(module), name))
        for member, parameters in members(registry.Backend).items():
            assert offered[member] == parameters, f"{path}.{member}"
    assert members(OwnBackend).items() >= members(registry.Backend).items()


@pytest.mark.slow
def test_local_device_maps_weights_and_answers(path: Path, made: list[OwnDevice], right: list[list[int]]) -> None:
    with LoadedModel.load(path, options()) as llama:
        (here,) = made
        mapped = llama.file.shard_data(0)
        weights = [buffer for buffer in here.buffers if np.shares_memory(buffer.data, mapped)]
        assert here.weights and len(weights) == len(here.weights), "weights are not copied"
        assert all(buffer.locked for buffer in weights)
        assert at_once(llama) == right
    assert here.computed >= 10  # the count holds even if all prompts are evaluated in one step


@pytest.mark.parametrize("places", [(), ("far",)], ids=["local", "not local"])
def test_runner_on_a_single_device(
    path: Path, made: list[OwnDevice], right: list[list[int]], places: tuple[str, ...]
) -> None:
    """No placement is given; operations are timed only if the whole model is on this machine."""
    (device,) = OwnBackend(places, registry.DeviceOptions()).devices()
    with GGUFFile.open(path) as file:
        tokens = np.array(load_tokenizer(file.metadata).encode(PROMPTS[0]), np.int32)
        runner = ModelRunner(file, load_model(file), [device], RunnerOptions(n_cells=64, max_batch=32))
        handle = runner.memory.allocate(len(tokens))
        assert handle is not None
        outputs = np.array([len(tokens) - 1], np.int32)
        logits = runner.start(tokens, [Span(handle, 0, len(tokens))], outputs).result(60)
        assert int(logits[0].argmax()) == right[0][0]
        runner.memory.free(handle)
        if device.local:
            assert {"MUL_MAT", "FLASH_ATTN_EXT"} <= {time.label for time in runner.profile(3).operations}
        else:
            with pytest.raises(ForwardError, match="timed only where"):
                runner.profile(3)
        runner.close()


@pytest.mark.slow
def test_split_over_two_devices_survives_a_loss(path: Path, made: list[OwnDevice], right: list[list[int]]) -> None:
    with LoadedModel.load(path, options(SPLIT)) as llama:
        here, first, second = made
        assert [device.endpoint and device.endpoint.host for device in made] == [None, "a", "b"]
        assert first.weights and second.weights and not {*first.weights} & {*second.weights}
        mapped = llama.file.shard_data(0)
        assert not any(np.shares_memory(b.data, mapped) for d in (first, second) for b in d.buffers)
        assert at_once(llama) == right
        first.left = 7  # in the middle of answers
        assert at_once(llama) == right
        assert first.lost is not None and first.closed
        (again,) = made[3:]
        assert again.name == first.name and {*again.weights} == {*first.weights} and again.computed > 5
        assert min(here.computed, second.computed) > 10


@pytest.mark.parametrize("lacks", ["FLASH_ATTN_EXT", "Q4_0"])
def test_incapable_device_is_refused_before_loading(
    path: Path, made: list[OwnDevice], monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """Missing operations and types are detected before any weight is sent."""
    original = OwnDevice.supports

    def supports(device: OwnDevice, op: Op, type: TensorType) -> bool:
        lacking = device.endpoint is not None and lacks in (op.name, type.name if op is Op.MUL_MAT else "")
        return not lacking and original(device, op, type)

    monkeypatch.setattr(OwnDevice, "supports", supports)
    with pytest.raises(DeviceError, match=rf"^OWN0\[a\] cannot run this model: it has no .*{lacks}"):
        LoadedModel.load(path, options(SPLIT))
    assert len(made) == 3 and not any(device.weights or device.buffers for device in made)


def test_registry_opens_devices_by_kind(made: list[OwnDevice]) -> None:
    assert registry.open_device("cpu") is made[0] and made[0].local
    assert registry.open_device("RPC://some:where") is made[1] and not made[1].local
    with pytest.raises(DeviceError, match="no kind of device called 'cuda'; known are cpu, rpc"):
        registry.open_device("cuda://0")
    for device in made:
        device.close()


def test_builtin_devices_are_opened_by_name() -> None:
    device = registry.open_device("cpu", registry.DeviceOptions(n_threads=1))
    assert isinstance(device, CpuDevice) and device.details == "1 thread"
    device.close()
    workers = registry.backend("rpc", ("127.0.0.1:1",))
    (gone,) = workers.connect(0.2)
    assert isinstance(gone, registry.Unreachable) and gone.where == "127.0.0.1:1" and workers.weight_types() is None
    with pytest.raises(DeviceLost, match="on none of the workers"):
        workers.reconnect(OwnDevice("RPC0[a:1]", Place("a")))
    with pytest.raises(DeviceLost, match="of this process"):
        registry.backend("cpu").reconnect(OwnDevice("CPU"))
