"""Real models through the kernels: what they say, and how sure of each token they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import BEST, can_run

from llamado.devices.cpu.lowerings import LOWERINGS
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions

PROMPT = "The three largest rivers of South America are"
# llama.cpp says the same of SmolLM2.
SMOLLM2 = (
    " the Amazon, the Amazon River, and the Amazon River itself. The Amazon River is the largest river in South "
    "America, and it is also the largest river in"
)
GEMMA3 = (
    " the Amazon, the Amazon River and the Amazon River. The Amazon River is the largest river in South America, and "
    "is the world's largest river. It"
)
LOG_PROBABILITIES = {
    "smollm2_path": [
        -0.401082, -0.027794, -0.284592, -0.312551, -0.555491, -0.590586, -0.728555, -0.159379, -0.063900,
        -1.370771, -0.652207, -0.965149, -0.353929, -1.268355, -0.969732, -0.690267, -0.416272, -0.720409,
        -0.131609, -0.467170, -0.237320, -0.160908, -0.002939, -0.821522, -1.209812, -0.517387, -1.405981,
        -1.301647, -0.583406, -0.339349, -0.485098, -0.518811,
    ],
    "gemma3_path": [
        -0.981160, -0.344021, -0.387758, -0.773893, -2.015420, -0.562932, -0.363693, -0.059281, -1.345198,
        -1.193455, -0.742727, -1.551140, -0.354625, -0.725639, -0.708758, -0.446660, -1.148810, -0.186117,
        -0.148721, -0.293017, -0.004750, -1.170010, -1.232591, -1.441848, -0.747156, -1.333758, -0.681417,
        -0.001124, -1.380532, -0.471768, -0.634838, -0.959498,
    ],
}  # fmt: skip
CASES = [
    pytest.param("smollm2_path", SMOLLM2, BEST, id=f"smollm2-{BEST}"),
    *(
        pytest.param("smollm2_path", SMOLLM2, name, id=f"smollm2-{name}", marks=pytest.mark.full)
        for name in sorted(LOWERINGS)
        if name != BEST
    ),
    pytest.param("gemma3_path", GEMMA3, BEST, id="gemma3"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "text", "lowering"), CASES)
def test_a_real_models_graph(
    model: str, text: str, lowering: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with every lowering. Probabilities are numpy's, whose exponential is not the same everywhere."""
    if not can_run(lowering):
        pytest.skip(f"this machine has no {lowering}")
    path: Path = request.getfixturevalue(model)
    monkeypatch.setenv("LLAMADO_SIMD", lowering)
    n = 32 if model == "smollm2_path" else 12
    with LoadedModel.load(path, EngineOptions(n_ctx=256)) as llama:
        result = llama.complete(PROMPT, n_predict=n, temperature=0.0, n_probs=1)
    assert text.startswith(result.content) and len(result.content) >= len(text) * n // 48
    assert [p.token.logprob for p in result.probs] == pytest.approx(LOG_PROBABILITIES[model][:n], abs=2e-6)
