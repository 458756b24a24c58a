"""Helm chart: the manifests of `deploy kubernetes`, with values for the settings that operators change.

Templates are made from the manifests: placeholders mark the values, and become Go templates in the text.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from llamado import __version__
from llamado.cluster.deploy.deployment import Deployment, SecretText, flag_name, yaml_text
from llamado.cluster.deploy.kubernetes import (
    CACHE_SIZE,
    Manifest,
    escape,
    manifests,
    most_replicas,
    resources,
    scales,
    secrets,
)

_NAME = "x-name-x"
"""Placeholder of the release's name. It is a valid deployment name, because Deployment checks its name."""
_PLACEHOLDER = re.compile(r"x-mark-(\w+)-x")

_GIVEN = "secrets.values.yaml"
"""File with the given values of secrets: helm install -f chart/secrets.values.yaml NAME chart."""

# Templates of the placeholders. In templates of whole lines, @ is the indentation.
_SCALARS = {
    "image": "{{ .Values.image | quote }}",
    "claim": '{{ .Values.models | default (printf "%s-models" .Release.Name) | quote }}',
    "least": "{{ .Values.server.replicas }}",
    "most": "{{ .Values.server.maxReplicas }}",
    "workers": "{{ .Values.worker.count }}",
    "size": "{{ add (int .Values.worker.count) 1 }}",
    "storage": "{{ .Values.worker.storage | quote }}",
}
_ARGUMENTS = """\
@{{- range .Values.server.args }}
@- {{ . | replace "$(" "$$(" | quote }}
@{{- end }}"""
_RESOURCES = """\
@{{- with .Values.PART.resources }}
@resources:
@  {{- toYaml . | nindent WIDTH }}
@{{- end }}"""
_RPC = (
    "{{ range $i := until (int .Values.worker.count) }}{{ if $i }},{{ end }}SCHEME{{ $.Release.Name }}-worker-{{ $i }}."
    "{{ $.Release.Name }}-worker:PORT{{ end }}"
)
_REPLICAS = (
    "{{ range $i := until (int .Values.server.MOST) }}{{ if $i }},{{ end }}http://{{ $.Release.Name }}-HOME-"
    "{{ $i }}.{{ $.Release.Name }}-HOME:PORT{{ end }}"
)
_RPC_OF_GROUP = (
    "{{ range $i := until (int .Values.worker.count) }}{{ if $i }},{{ end }}SCHEME$(LWS_GROUP)-{{ add $i 1 }}."
    "{{ $.Release.Name }}-group:PORT{{ end }}"
)


def helm(deployment: Deployment) -> dict[str, str]:
    """Return the chart's files by their paths in its folder. Raises FlagError and DeploymentError."""
    template_deployment = replace(deployment, name=_NAME)
    files = {
        "Chart.yaml": _chart(deployment),
        "values.yaml": _values(deployment),
        "values.schema.json": _schema(deployment),
    }
    for manifest in manifests(template_deployment):
        part = str(manifest["metadata"]["name"]).removeprefix(f"{_NAME}-")
        files[f"templates/{manifest['kind'].lower()}-{part}.yaml"] = _template(manifest, deployment)
    if wanted := secrets(template_deployment):
        files["templates/secrets.yaml"] = _secrets(wanted)
        files["templates/NOTES.txt"] = _notes(wanted)
        if any(value for one in wanted for value in one["stringData"].values()):  # must not be packaged
            values = {_group_of(one, _NAME): one["stringData"] for one in wanted}
            files[_GIVEN] = SecretText(yaml_text({"secrets": {"create": True, **values}}))
            files[".helmignore"] = f"{_GIVEN}\n"
    return files


def _chart(deployment: Deployment) -> str:
    return yaml_text(
        {
            "apiVersion": "v2",
            "name": deployment.name,
            "description": "llamado: servers of a GGUF language model, and the workers that share it",
            "type": "application",
            "version": __version__,
            "appVersion": __version__,
        }
    )


# --- values -----------------------------------------------------------------------------------------------------------


def _values(deployment: Deployment) -> str:
    return "".join(f"# {about}\n{yaml_text({key: value})}" for key, value, about, _ in _keys(deployment))


def _keys(deployment: Deployment) -> list[tuple[str, Any, str, dict[str, Any]]]:
    """Return the values of the chart: key, default, description and schema."""
    text, sizes = {"type": "string", "minLength": 1}, {"type": "object"}
    words = {"type": "array", "items": {"type": "string"}, "minItems": 2}
    command = deployment.serve_command()
    server = {
        "args": command[1:-2],  # without "serve" and the port
        "replicas": deployment.replicas,
        "resources": resources(deployment, "server"),
    }
    count = {"type": "integer", "minimum": 1, "maximum": 1000}
    numbers, about_servers = (
        {"replicas": count},
        "Flags of llamado serve, number of servers, and resources of each",
    )
    if scales(deployment):
        server["maxReplicas"] = most_replicas(deployment)
        numbers["maxReplicas"] = count
        about_servers = (
            "Flags of llamado serve, minimum and maximum number of servers (more while requests wait), their resources"
        )
    found: list[tuple[str, Any, str, dict[str, Any]]] = [
        ("image", deployment.image, "Image built from `llamado deploy docker`", text),
        ("models", "", "Volume claim with the models, mounted by all (empty: RELEASE-models)", {"type": "string"}),
        ("server", server, about_servers, _object({"args": words, **numbers, "resources": sizes})),
    ]
    if deployment.workers:
        worker: dict[str, Any] = {"count": deployment.workers, "resources": resources(deployment, "worker")}
        limits: dict[str, Any] = {"count": count, "resources": sizes}
        if not deployment.leader_worker_set:
            worker["storage"], limits["storage"] = CACHE_SIZE, text
        each = " of each server" if deployment.leader_worker_set else ""
        about = f"Number of workers{each} that share the model, and resources of each"
        found.append(("worker", worker, about, _object(limits)))
    if wanted := secrets(deployment):
        given: dict[str, Any] = {"create": False}
        types: dict[str, Any] = {"create": {"type": "boolean"}}
        for one in wanted:
            group, keys = _group_of(one, deployment.name), list(one["stringData"])
            given[group], types[group] = dict.fromkeys(keys, ""), _object({key: {"type": "string"} for key in keys})
        found.append(
            (
                "secrets",
                given,
                "create: true creates the secrets from these values; otherwise they must exist",
                _object(types),
            )
        )
    return found


def _object(keys: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(keys), "properties": keys}


def _schema(deployment: Deployment) -> str:
    keys = {key: {**schema, "description": about} for key, _, about, schema in _keys(deployment)}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"Values of the chart {deployment.name}"}
    # Helm adds the key global.
    return (
        json.dumps({**head, **_object(keys | {"global": {"type": "object"}}), "required": list(keys)}, indent=2) + "\n"
    )


# --- templates --------------------------------------------------------------------------------------------------------


def _placeholder(name: str) -> str:
    return f"x-mark-{name}-x"


def _template(manifest: Manifest, deployment: Deployment) -> str:
    _insert_placeholders(manifest, deployment)
    lines: list[str] = []
    for line in yaml_text(manifest).splitlines():
        indent = line[: len(line) - len(line.lstrip(" "))]
        if line.strip() == f"- {_placeholder('args')}":
            lines.append(_ARGUMENTS.replace("@", indent))
        elif found := re.fullmatch(rf"{indent}resources: {_placeholder('(server|worker)')}", line):
            block = _RESOURCES.replace("PART", found[1]).replace("WIDTH", str(len(indent) + 2))
            lines.append(block.replace("@", indent))
        else:
            lines.append(_line(line, deployment))
    return "\n".join(lines) + "\n"


def _insert_placeholders(manifest: Manifest, deployment: Deployment) -> None:
    """Replace the values in a manifest by placeholders."""
    spec = manifest["spec"]
    match manifest["kind"]:
        case "HorizontalPodAutoscaler":
            spec["minReplicas"], spec["maxReplicas"] = _placeholder("least"), _placeholder("most")
        case "StatefulSet" | "Deployment":
            if "replicas" in spec:
                part = spec["template"]["spec"]["containers"][0]["name"]
                spec["replicas"] = _placeholder("workers" if part == "worker" else "least")
            for claim in spec.get("volumeClaimTemplates", []):
                claim["spec"]["resources"]["requests"]["storage"] = _placeholder("storage")
            _insert_pod_placeholders(spec["template"], deployment)
        case "LeaderWorkerSet":
            spec["replicas"] = _placeholder("least")
            group = spec["leaderWorkerTemplate"]
            group["size"] = _placeholder("size")
            _insert_pod_placeholders(group["leaderTemplate"], deployment)
            _insert_pod_placeholders(group["workerTemplate"], deployment)


def _insert_pod_placeholders(pod: Manifest, deployment: Deployment) -> None:
    for volume in pod["spec"]["volumes"]:
        if volume["name"] == "models":
            volume["persistentVolumeClaim"]["claimName"] = _placeholder("claim")
    for container in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
        container["image"] = _placeholder("image")
    for container in pod["spec"]["containers"]:
        part = container["name"]
        if part != "gateway":
            container["resources"] = _placeholder(part)
        if part == "gateway":
            flag = flag_name("gateway", "replica")
            container["args"][container["args"].index(flag) + 1] = _placeholder("replicas")
        elif part == "server":
            given = [escape(word) for word in deployment.serve_command()[:-2]]
            words = container["args"]
            assert words[: len(given)] == given
            container["args"] = [words[0], _placeholder("args"), *words[len(given) :]]
            if deployment.workers:
                at = len(container["args"]) - 1 - container["args"][::-1].index(flag_name("serve", "rpc"))
                container["args"][at + 1] = _placeholder("rpc")


def _line(line: str, deployment: Deployment) -> str:
    """Return a line with Go templates in place of placeholders and names."""
    group = deployment.workers and deployment.leader_worker_set
    rpc = _RPC_OF_GROUP if group else _RPC
    rpc = rpc.replace("SCHEME", "tls://" if deployment.tls else "").replace("PORT", str(deployment.worker_port))
    replicas = _REPLICAS.replace("HOME", "group" if group else "server").replace(
        "PORT", f"{deployment.port}{deployment.prefix}"
    )
    replicas = replicas.replace("MOST", "maxReplicas" if scales(deployment) else "replicas")
    scalars = {**_SCALARS, "rpc": f'"{rpc}"', "replicas": f'"{replicas}"'}
    line = _PLACEHOLDER.sub(lambda found: scalars[found[1]], line)
    # Quoted: YAML would read a name of digits as a number.
    line = re.sub(rf"(?<=: ){_NAME}$", "{{ .Release.Name | quote }}", line)
    return line.replace(_NAME, "{{ .Release.Name }}")


def _group_of(secret: Manifest, name: str) -> str:
    """Return the key of a secret in the values: its name without that of the release."""
    return str(secret["metadata"]["name"]).removeprefix(f"{name}-")


def _secrets(wanted: list[Manifest]) -> str:
    texts = []
    for secret in wanted:
        group = _group_of(secret, _NAME)
        values = {key: _placeholder(str(number)) for number, key in enumerate(secret["stringData"])}
        text = yaml_text({**secret, "stringData": values}).replace(_NAME, "{{ .Release.Name }}")
        for key, placeholder in values.items():
            text = text.replace(placeholder, f'{{{{ index .Values.secrets "{group}" "{key}" | quote }}}}')
        texts.append(text)
    return "{{- if .Values.secrets.create }}\n" + "---\n".join(texts) + "{{- end }}\n"


def _notes(wanted: list[Manifest]) -> str:
    lines = ["{{- if not .Values.secrets.create }}", "Create these secrets:"]
    for secret in wanted:
        name = secret["metadata"]["name"].replace(_NAME, "{{ .Release.Name }}")
        keys = [*secret["stringData"]]
        if name.endswith("-keys"):
            lines.append(f"  kubectl create secret generic {name} --from-env-file=FILE   # with {', '.join(keys)}")
        else:
            files = " ".join(f"--from-file={key}=FILE" for key in keys)
            lines.append(f"  kubectl create secret generic {name} --type={secret['type']} {files}")
    return "\n".join([*lines, "{{- end }}", ""])
