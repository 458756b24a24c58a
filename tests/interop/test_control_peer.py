"""Control vectors beside the real llama-server: the same files, scales and layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from control_files import make_control
from long_text import long_text
from parity import log_softmax, logits_along
from peer_server import llama_server
from rpc_workers import our_worker
from saved_logits import saved_logits
from tiny import TINY, make
from tiny_models import make_llama

from llamado.devices.split.placement import SplitOptions
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions

pytestmark = [pytest.mark.interop, pytest.mark.full]
PROMPT = [*range(3, 40)]
N_CTX, N_PREDICT = 128, 24
CACHE = ["-ctk", "f32", "-ctv", "f32"]


def test_equals_llama_cpp(peer_bin: Path, tmp_path: Path) -> None:
    model = make_llama(tmp_path / "m.gguf", n_layer=4, wtype="F32")
    with LoadedModel.load(model, EngineOptions(n_ctx=N_CTX)) as llama:
        n_embd = llama.model.hparams.n_embd
    first = make_control(tmp_path / "a.gguf", n_embd, range(1, 5), size=0.6)
    second = make_control(tmp_path / "b.gguf", n_embd, (1, 2), size=0.6, seed=1)
    options = EngineOptions(n_ctx=N_CTX, type_k="f32", type_v="f32", control=((str(first), 1.0), (str(second), -0.7)))
    flags = ["--control-vector", str(first), "--control-vector-scaled", f"{second}:-0.7", *CACHE]
    text = tmp_path / "text.txt"
    text.write_text(long_text(4 * N_CTX))
    seen = []
    for layers in ((0, 0), (1, 2), (3, 9)):
        more = ["--control-vector-layer-range", *map(str, layers)] if any(layers) else []
        theirs = saved_logits(peer_bin, model, text, N_CTX, ["--chunks", "1", *flags, *more])
        with LoadedModel.load(model, replace(options, control_layers=layers)) as llama:
            llama.engine.close()  # the forward pass is driven from here
            rows = logits_along(llama.forward, theirs.tokens[0].tolist(), theirs.first)
            ours = np.array([log_softmax(row) for row in rows][:-1])
        top = np.argsort(ours, axis=-1)[:, -10:]  # what is too unlikely is cut off in theirs
        right = np.take_along_axis(theirs.logprobs[0], top, -1)
        assert np.abs(np.take_along_axis(ours, top, -1) - right).max() < 2e-3, layers
        seen.append(ours)
    assert min(np.abs(a - b).max() for a, b in ((seen[0], seen[1]), (seen[1], seen[2]))) > 0.1, "layers matter"
    body = {"prompt": PROMPT, "n_predict": N_PREDICT, "temperature": 0, "return_tokens": True}
    with llama_server(peer_bin, model, tmp_path / "s.log", "-c", str(N_CTX), "-t", "1", *flags) as client:
        answer = client.post("/completion", json=body).raise_for_status().json()
    with our_worker(tmp_path / "w.log") as one, our_worker(tmp_path / "v.log") as two:
        split = SplitOptions(rpc=(one.endpoint, two.endpoint), tensor_split=(1.0, 1.0))
        found = []
        for each in (options, replace(options, split=split)):
            with LoadedModel.load(model, each) as llama:
                result = llama.complete(PROMPT, n_predict=N_PREDICT, n_probs=5, temperature=0.0)
                found.append((result.tokens, result.probs))
        assert found[0] == found[1] and one.graphs() > 1 and two.graphs() > 1
    assert found[0][0] == answer["tokens"]


@pytest.mark.parametrize("name", ["graniteswitch", "hrm_text"])
def test_layers_have_the_real_ones_numbers(peer_bin: Path, tmp_path: Path, name: str) -> None:
    """The numbers agree even if layers are visited in another order than they have in the file."""
    model = make(TINY[name], tmp_path / "m.gguf")
    vector = make_control(tmp_path / "a.gguf", TINY[name].n_embd, (1,), size=0.6)
    text = tmp_path / "text.txt"
    text.write_text(long_text(4 * N_CTX))
    options = EngineOptions(n_ctx=N_CTX, type_k="f32", type_v="f32")
    theirs = saved_logits(peer_bin, model, text, N_CTX, ["--chunks", "1", "--control-vector", str(vector), *CACHE])
    found = []
    for control in ((), ((str(vector), 1.0),)):
        with LoadedModel.load(model, replace(options, control=control)) as llama:
            llama.engine.close()  # the forward pass is driven from here
            rows = logits_along(llama.forward, theirs.tokens[0].tolist(), theirs.first)
            ours = np.array([log_softmax(row) for row in rows][:-1])
        top = np.argsort(theirs.logprobs[0], axis=-1)[:, -10:]
        found.append(np.abs(np.take_along_axis(ours - theirs.logprobs[0], top, -1)).max())
    assert found[0] > 0.1 and found[1] < 1e-2
