"""Helm chart: lint passes, and the rendered manifests equal those of `deploy kubernetes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from test_deploy import KINDS, KUBERNETES, SERVE

from llamado.cluster.deploy.deployment import Deployment
from llamado.cluster.deploy.kubernetes import secrets
from llamado.cluster.deploy.targets import files_for

MORE: dict[str, dict[str, Any]] = {
    "grouped": {"workers": 2, "replicas": 3, "leader_worker_set": True},
    "grouped and closed": {"workers": 1, "leader_worker_set": True, "tls": True, "key": True, "gateway": ()},
    "behind a gateway": {"replicas": 2, "workers": 2, "gateway": ("--patience", "20"), "tls": True, "key": True},
    "literal": {"serve": (*SERVE, "--chat-template", "{{ messages }} $(HOME) 'x' \"y\" x: #")},
}


@pytest.fixture(params=[*KINDS, *MORE])
def deployment(request: pytest.FixtureRequest) -> Deployment:
    return Deployment(**{"serve": SERVE, **(KINDS | MORE)[request.param]})


@pytest.fixture(scope="module")
def helm() -> Any:
    return pytest.importorskip("helm_python", reason="Helm is not installed: pip install helm-python-sdk")


def chart_of(deployment: Deployment, folder: Path) -> Path:
    for name, text in files_for("helm", deployment).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def by_name(texts: list[str]) -> dict[str, Any]:
    found = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return {f"{one['kind']} {one['metadata']['name']}": one for one in found}


def given(deployment: Deployment) -> dict[str, Any]:
    """Return the values that make the chart create the same secrets as `deploy kubernetes`."""
    files = files_for("helm", deployment)
    if "secrets.values.yaml" in files:
        assert files[".helmignore"] == "secrets.values.yaml\n"
        return dict(yaml.safe_load(files["secrets.values.yaml"]))
    return {"secrets": {"create": True}} if secrets(deployment) else {}


def test_helm_renders_the_manifests_of_deploy_kubernetes(helm: Any, deployment: Deployment, tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate: it has the schemas")
    with helm.Chart.load(chart_of(deployment, tmp_path / "chart")) as chart:
        rendered = chart.render(given(deployment), name=deployment.name, namespace="default")
        plain = chart.render({}, name=deployment.name, namespace="default")
    found = by_name([text for name, text in rendered.items() if not name.endswith(".txt")])
    assert found == by_name([*files_for("kubernetes", deployment).values()])
    for one in found.values():
        if one["kind"] != "LeaderWorkerSet":  # not one of Kubernetes' own kinds
            validate.validate(one, KUBERNETES, strict=True)
    secret = [one["metadata"]["name"] for one in secrets(deployment)]
    assert not by_name([text for name, text in plain.items() if "secrets" in name])
    notes = "".join(text for name, text in plain.items() if name.endswith("NOTES.txt"))
    assert all(name in notes for name in secret)


def test_helm_lint_passes(helm: Any, deployment: Deployment, tmp_path: Path) -> None:
    folder = chart_of(deployment, tmp_path / deployment.name)
    result = helm.lint(folder, {}, strict=True)
    assert [one for one in result["messages"] if one["severity"] > 1] == [] and not result["errors"]
    template = next((folder / "templates").glob("*-server.yaml"))
    template.write_text(template.read_text().replace("{{ .Release.Name }}", "{{ .Release.Name ", 1))
    assert helm.lint(folder, {}, strict=True)["errors"]


def test_values_change_the_manifests(helm: Any, tmp_path: Path) -> None:
    deployment = Deployment(serve=(*SERVE, "--api-prefix", "/llm"), workers=2, gateway=())
    values = {
        "image": "registry.example/llamado:7",
        "models": "claim",
        "server": {"args": ["-m", "other.gguf"], "replicas": 3, "resources": {"limits": {"cpu": 2}}},
        "worker": {"count": 3, "storage": "7Gi"},
    }
    with helm.Chart.load(chart_of(deployment, tmp_path / "chart")) as chart:
        found = by_name([*chart.render(values, name="my", namespace="n").values()])
        for wrong in (
            {"workers": 3},
            {"server": {"replicas": 0}},
            {"server": {"maxReplicas": 4}},
            {"worker": {"count": "3"}},
            {"image": ""},
        ):
            with pytest.raises(helm.HelmValuesError):
                chart.validate_schema(wrong)
    server, worker, gateway = (
        found[name]["spec"]["template"]["spec"]
        for name in ("StatefulSet my-server", "StatefulSet my-worker", "Deployment my-gateway")
    )
    arguments = server["containers"][0]["args"]
    assert arguments[:3] == ["serve", "-m", "other.gguf"]
    assert arguments[-1] == "my-worker-0.my-worker:50052,my-worker-1.my-worker:50052,my-worker-2.my-worker:50052"
    replicas = gateway["containers"][0]["args"][-1]
    assert replicas == ",".join(f"http://my-server-{i}.my-server:8080/llm" for i in range(3))
    assert server["containers"][0]["resources"] == {"limits": {"cpu": 2}} and "resources" not in worker["containers"][0]
    assert {pod["containers"][0]["image"] for pod in (server, worker, gateway)} == {"registry.example/llamado:7"}
    assert server["volumes"][0]["persistentVolumeClaim"]["claimName"] == "claim"
    assert found["StatefulSet my-worker"]["spec"]["replicas"] == 3
    assert found["StatefulSet my-server"]["spec"]["replicas"] == 3


def test_values_change_the_autoscaler(helm: Any, tmp_path: Path) -> None:
    deployment = Deployment(serve=SERVE, gateway=())
    with helm.Chart.load(chart_of(deployment, tmp_path / "chart")) as chart:
        values = {"server": {"replicas": 2, "maxReplicas": 3}}
        found = by_name([*chart.render(values, name="my", namespace="n").values()])
    scaler = found["HorizontalPodAutoscaler my-server"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 3)
    replicas = found["Deployment my-gateway"]["spec"]["template"]["spec"]["containers"][0]["args"][-1]
    assert replicas.count("http://") == 3


def test_the_values_match_their_schema(deployment: Deployment) -> None:
    files = files_for("helm", deployment)
    schema, values = json.loads(files["values.schema.json"]), yaml.safe_load(files["values.yaml"])
    jsonschema_rs.validate(schema, values)
    assert ("worker" in values) == (deployment.workers > 0) and ("secrets" in values) == bool(secrets(deployment))
    assert not jsonschema_rs.is_valid(schema, {**values, "workers": 2})
    assert yaml.safe_load(files["Chart.yaml"])["name"] == deployment.name


def test_a_chart_is_written_with_its_folders(tmp_path: Path) -> None:
    from llamado.commands import cli

    assert cli.main(["deploy", "helm", "--out", str(tmp_path / "c"), "--", "-m", "/models/m.gguf"]) == 0
    assert (tmp_path / "c" / "templates" / "deployment-server.yaml").exists()
