"""`/metrics` of the router: the metrics of all loaded models, merged."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from router_process import Start, config, fake
from tiny_models import make_llama
from waiting import until

from llamado.router import app

ONE = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 5
# HELP seconds How long it took.
# TYPE seconds histogram
seconds_bucket{le="0.1"} 1
seconds_bucket{le="+Inf"} 2
seconds_sum 0.5
seconds_count 2
"""


@pytest.mark.slow
def test_metrics_of_all_loaded_models(start_router: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "METRICS_TIMEOUT", 0.5)
    (tmp_path / "one").write_text(ONE)
    models = {name: fake(name, f"metrics={tmp_path / 'one'}", aliases=[f"also-{name}"]) for name in "abc"}
    models["loads"] = fake("l", "ready=600", f"metrics={tmp_path / 'one'}")
    router = start_router(config({**models, "hangs": fake("h", "metrics=hang"), "none": fake("n")}))

    def shown() -> set[str]:
        response = router.http.get("/metrics")
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        if not families:
            return set()
        assert set(families) == {"llamacpp:prompt_tokens", "seconds"} and families["seconds"].type == "histogram"
        named = [{sample.labels["model"] for sample in family.samples} for family in families.values()]
        assert named[0] == named[1]
        return named[0]

    assert shown() == set() and router.running() == {}  # no model is loaded for it
    router.ask("none")
    refused = router.http.get("/metrics")
    assert refused.status_code == 501 and "--metrics" in refused.json()["error"]["message"]
    for name in ("a", "also-b", "hangs"):
        router.ask(name)
    router.http.post("/models/load", json={"model": "loads"})
    until(lambda: "progress" in router.status("loads"))  # it responds but is not loaded yet
    assert shown() == {"a", "b"}
    assert "model hangs: no metrics: no answer within 0.5 s" in router.log.read_text()
    assert router.http.get("/metrics?model=also-a").text == ONE
    router.http.post("/models/unload", json={"model": "a"})
    until(lambda: "a" not in router.running())
    assert shown() == {"b"}


@pytest.mark.full
def test_metrics_of_llamado_servers(start_router: Start, tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_llama(tmp_path / f"{name}.gguf")
    router = start_router(None, "-m", str(tmp_path / "one.gguf"), "-m", str(tmp_path / "two.gguf"), "--metrics")
    for name in ("one", "two"):
        answer = router.http.post("/completion", json={"model": name, "prompt": "a", "n_predict": 2}, timeout=120)
        assert answer.status_code == 200, answer.text
    text = router.http.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    of_models = [family for family in families if not family.name.startswith("llamado_router_")]
    assert {sample.labels["model"] for family in of_models for sample in family.samples} == {"one", "two"}
    assert 'llamado_router_http_requests_total{endpoint="/completion",method="POST",status="200"} 2.0' in text
    assert text.count("# TYPE llamacpp:prompt_tokens_total ") == 1
    for line in router.http.get("/metrics?model=one").text.splitlines():
        if line.startswith("# TYPE"):
            assert line in text
