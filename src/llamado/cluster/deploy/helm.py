"""A chart of Helm's: the manifests of `deploy kubernetes`, with values in the places that operators change.

Templates are made of the manifests themselves: marks stand where a value belongs, and become Go templates in the text.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from llamado import __version__
from llamado.cluster.deploy.deployment import Deployment, SecretText, spelled, yaml_text
from llamado.cluster.deploy.kubernetes import (
    CACHE_SIZE,
    Manifest,
    literal,
    manifests,
    most_replicas,
    resources,
    scales,
    secrets,
)

_NAME = "x-name-x"
"""The release's name, where the deployment's stands; a name itself, as it is checked to be one."""
_MARK = re.compile(r"x-mark-(\w+)-x")

_GIVEN = "secrets.values.yaml"
"""File of the values of secrets that were given: helm install -f chart/secrets.values.yaml NAME chart."""

# What stands for marks. Those of a whole line know their indentation as @.
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


def helm(what: Deployment) -> dict[str, str]:
    """The chart's files by their paths in its folder. Raises FlagError and DeploymentError."""
    marked = replace(what, name=_NAME)
    files = {"Chart.yaml": _chart(what), "values.yaml": _values(what), "values.schema.json": _schema(what)}
    for manifest in manifests(marked):
        part = str(manifest["metadata"]["name"]).removeprefix(f"{_NAME}-")
        files[f"templates/{manifest['kind'].lower()}-{part}.yaml"] = _template(manifest, what)
    if wanted := secrets(marked):
        files["templates/secrets.yaml"] = _secrets(wanted)
        files["templates/NOTES.txt"] = _notes(wanted)
        if any(value for one in wanted for value in one["stringData"].values()):  # which belongs into no package
            values = {_group_of(one, _NAME): one["stringData"] for one in wanted}
            files[_GIVEN] = SecretText(yaml_text({"secrets": {"create": True, **values}}))
            files[".helmignore"] = f"{_GIVEN}\n"
    return files


def _chart(what: Deployment) -> str:
    return yaml_text(
        {
            "apiVersion": "v2",
            "name": what.name,
            "description": "llamado: servers of a GGUF language model, and the workers that share it",
            "type": "application",
            "version": __version__,
            "appVersion": __version__,
        }
    )


# --- values -----------------------------------------------------------------------------------------------------------


def _values(what: Deployment) -> str:
    return "".join(f"# {about}\n{yaml_text({key: value})}" for key, value, about, _ in _keys(what))


def _keys(what: Deployment) -> list[tuple[str, Any, str, dict[str, Any]]]:
    """The values: key, default, what it means, and its schema."""
    text, sizes = {"type": "string", "minLength": 1}, {"type": "object"}
    words = {"type": "array", "items": {"type": "string"}, "minItems": 2}
    command = what.serve_command()
    server = {
        "args": command[1:-2],  # without "serve" and the port
        "replicas": what.replicas,
        "resources": resources(what, "server"),
    }
    count = {"type": "integer", "minimum": 1, "maximum": 1000}
    numbers, about_servers = (
        {"replicas": count},
        "Flags of llamado serve; how many servers there are; what each may use",
    )
    if scales(what):
        server["maxReplicas"] = most_replicas(what)
        numbers["maxReplicas"] = count
        about_servers = (
            "Flags of llamado serve; how many there are at least and at most, while requests wait; what each may use"
        )
    found: list[tuple[str, Any, str, dict[str, Any]]] = [
        ("image", what.image, "The image that `llamado deploy docker` makes", text),
        ("models", "", "The volume claim of the models, read by all (empty: RELEASE-models)", {"type": "string"}),
        ("server", server, about_servers, _object({"args": words, **numbers, "resources": sizes})),
    ]
    if what.workers:
        worker: dict[str, Any] = {"count": what.workers, "resources": resources(what, "worker")}
        limits: dict[str, Any] = {"count": count, "resources": sizes}
        if not what.leader_worker_set:
            worker["storage"], limits["storage"] = CACHE_SIZE, text
        about = "How many share the model, for each server" if what.leader_worker_set else "How many share the model"
        found.append(("worker", worker, about, _object(limits)))
    if wanted := secrets(what):
        given: dict[str, Any] = {"create": False}
        types: dict[str, Any] = {"create": {"type": "boolean"}}
        for one in wanted:
            group, keys = _group_of(one, what.name), list(one["stringData"])
            given[group], types[group] = dict.fromkeys(keys, ""), _object({key: {"type": "string"} for key in keys})
        found.append(
            (
                "secrets",
                given,
                "create: true makes the secrets from these values; without it they must exist",
                _object(types),
            )
        )
    return found


def _object(keys: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(keys), "properties": keys}


def _schema(what: Deployment) -> str:
    keys = {key: {**schema, "description": about} for key, _, about, schema in _keys(what)}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"Values of the chart {what.name}"}
    # Helm itself adds the key global.
    return (
        json.dumps({**head, **_object(keys | {"global": {"type": "object"}}), "required": list(keys)}, indent=2) + "\n"
    )


# --- templates --------------------------------------------------------------------------------------------------------


def _mark(name: str) -> str:
    return f"x-mark-{name}-x"


def _template(manifest: Manifest, what: Deployment) -> str:
    _put_marks(manifest, what)
    lines: list[str] = []
    for line in yaml_text(manifest).splitlines():
        indent = line[: len(line) - len(line.lstrip(" "))]
        if line.strip() == f"- {_mark('args')}":
            lines.append(_ARGUMENTS.replace("@", indent))
        elif found := re.fullmatch(rf"{indent}resources: {_mark('(server|worker)')}", line):
            block = _RESOURCES.replace("PART", found[1]).replace("WIDTH", str(len(indent) + 2))
            lines.append(block.replace("@", indent))
        else:
            lines.append(_line(line, what))
    return "\n".join(lines) + "\n"


def _put_marks(manifest: Manifest, what: Deployment) -> None:
    """Marks in the places of values, wherever these are in a manifest."""
    spec = manifest["spec"]
    match manifest["kind"]:
        case "HorizontalPodAutoscaler":
            spec["minReplicas"], spec["maxReplicas"] = _mark("least"), _mark("most")
        case "StatefulSet" | "Deployment":
            if "replicas" in spec:
                part = spec["template"]["spec"]["containers"][0]["name"]
                spec["replicas"] = _mark("workers" if part == "worker" else "least")
            for claim in spec.get("volumeClaimTemplates", []):
                claim["spec"]["resources"]["requests"]["storage"] = _mark("storage")
            _put_marks_in_pod(spec["template"], what)
        case "LeaderWorkerSet":
            spec["replicas"] = _mark("least")
            group = spec["leaderWorkerTemplate"]
            group["size"] = _mark("size")
            _put_marks_in_pod(group["leaderTemplate"], what)
            _put_marks_in_pod(group["workerTemplate"], what)


def _put_marks_in_pod(pod: Manifest, what: Deployment) -> None:
    for volume in pod["spec"]["volumes"]:
        if volume["name"] == "models":
            volume["persistentVolumeClaim"]["claimName"] = _mark("claim")
    for container in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
        container["image"] = _mark("image")
    for container in pod["spec"]["containers"]:
        part = container["name"]
        if part != "gateway":
            container["resources"] = _mark(part)
        if part == "gateway":
            flag = spelled("gateway", "replica")
            container["args"][container["args"].index(flag) + 1] = _mark("replicas")
        elif part == "server":
            given = [literal(word) for word in what.serve_command()[:-2]]
            words = container["args"]
            assert words[: len(given)] == given
            container["args"] = [words[0], _mark("args"), *words[len(given) :]]
            if what.workers:
                at = len(container["args"]) - 1 - container["args"][::-1].index(spelled("serve", "rpc"))
                container["args"][at + 1] = _mark("rpc")


def _line(line: str, what: Deployment) -> str:
    """A line with values in the places of marks and names."""
    group = what.workers and what.leader_worker_set
    rpc = _RPC_OF_GROUP if group else _RPC
    rpc = rpc.replace("SCHEME", "tls://" if what.tls else "").replace("PORT", str(what.worker_port))
    replicas = _REPLICAS.replace("HOME", "group" if group else "server").replace("PORT", f"{what.port}{what.prefix}")
    replicas = replicas.replace("MOST", "maxReplicas" if scales(what) else "replicas")
    scalars = {**_SCALARS, "rpc": f'"{rpc}"', "replicas": f'"{replicas}"'}
    line = _MARK.sub(lambda found: scalars[found[1]], line)
    # a name of digits alone would be a number
    line = re.sub(rf"(?<=: ){_NAME}$", "{{ .Release.Name | quote }}", line)
    return line.replace(_NAME, "{{ .Release.Name }}")


def _group_of(secret: Manifest, name: str) -> str:
    """Key of the values of a secret: its name without that of the release."""
    return str(secret["metadata"]["name"]).removeprefix(f"{name}-")


def _secrets(wanted: list[Manifest]) -> str:
    texts = []
    for secret in wanted:
        group = _group_of(secret, _NAME)
        values = {key: _mark(str(number)) for number, key in enumerate(secret["stringData"])}
        text = yaml_text({**secret, "stringData": values}).replace(_NAME, "{{ .Release.Name }}")
        for key, mark in values.items():
            text = text.replace(mark, f'{{{{ index .Values.secrets "{group}" "{key}" | quote }}}}')
        texts.append(text)
    return "{{- if .Values.secrets.create }}\n" + "---\n".join(texts) + "{{- end }}\n"


def _notes(wanted: list[Manifest]) -> str:
    lines = ["{{- if not .Values.secrets.create }}", "These secrets have to be there:"]
    for secret in wanted:
        name = secret["metadata"]["name"].replace(_NAME, "{{ .Release.Name }}")
        keys = [*secret["stringData"]]
        if name.endswith("-keys"):
            lines.append(f"  kubectl create secret generic {name} --from-env-file=FILE   # with {', '.join(keys)}")
        else:
            files = " ".join(f"--from-file={key}=FILE" for key in keys)
            lines.append(f"  kubectl create secret generic {name} --type={secret['type']} {files}")
    return "\n".join([*lines, "{{- end }}", ""])
