"""Manifests of Kubernetes: servers, workers, who may reach them, and when they are restarted.

The startup probe waits for the model, readiness takes a server out of the service while it cannot answer (its worker is
away, its engine waits), and liveness restarts the process alone that does not work any more: never for a worker that is
away, which a restart would not bring back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamado.cluster.deploy.containers import CACHE, MODELS, PROBE, USER
from llamado.cluster.deploy.deployment import Deployment, SecretText, read_secret, spelled, yaml_text

LIVE, READY = "/livez", "/readyz"
CACHE_SIZE = "50Gi"
"""Of the disk on which a worker keeps what it was sent."""
_START_SECONDS = 1800
_END_SECONDS = 90
_TLS, _FILES = "/tls", "/files"
_IN_TLS = {"ssl_key_file": "tls.key", "ssl_cert_file": "tls.crt"}

WAITING = "llamacpp:requests_deferred"
"""The metric by which servers become more; Kubernetes' names have no colons."""

Manifest = dict[str, Any]


def kubernetes(what: Deployment) -> dict[str, str]:
    """All manifests in one file, and secrets in another if there are any: an example if values are to be filled in."""
    files = {f"{what.name}.yaml": yaml_text(*manifests(what))}
    if found := secrets(what):
        known = all(value for one in found for value in one["stringData"].values())
        name, about = f"{what.name}-secrets.yaml", "# Keep it out of repositories.\n"
        if not known:
            name, about = f"{what.name}-secrets.example.yaml", "# Fill in what is empty, in a copy of this file.\n"
        files[name] = SecretText(about + yaml_text(*found))
    return files


def manifests(what: Deployment) -> list[Manifest]:
    """All but secrets."""
    found = [_server_service(what)]
    if what.workers and what.leader_worker_set:
        found.append(_leader_worker_set(what))
    else:
        found.append(_servers(what))
        if what.workers:
            found += [_worker_service(what), _workers(what)]
    if what.workers:
        found.append(_budget(what, "worker"))
    if what.gateway is not None:
        found += [_gateway_service(what), _gateways(what), _budget(what, "gateway")]
    found.append(_budget(what, "server"))
    if scales(what):
        found.append(_scaler(what))
    return [*found, *_policies(what)]


def scales(what: Deployment) -> bool:
    """Return True if servers may be scaled automatically: shared workers have memory for a fixed number."""
    return not what.workers or what.leader_worker_set


def _meta(what: Deployment, part: str) -> Manifest:
    return {"name": f"{what.name}-{part}", "labels": _labels(what, part)}


def _labels(what: Deployment, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": what.name, "app.kubernetes.io/component": part}


def _selector(what: Deployment, part: str) -> Manifest:
    return {"matchLabels": _labels(what, part)}


# --- containers -------------------------------------------------------------------------------------------------------


def _container(what: Deployment, part: str, command: list[str], port: int) -> Manifest:
    container: Manifest = {
        "name": part,
        "image": what.image,
        "args": [literal(word) for word in command],
        "ports": [{"name": "rpc" if part == "worker" else "http", "containerPort": port}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "models", "mountPath": MODELS, "readOnly": True},
            {"name": "cache", "mountPath": CACHE},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if part == "gateway":  # holds no model
        container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
    elif sizes := resources(what, part):
        container["resources"] = sizes
    if has_tls(what, part):
        container["volumeMounts"].append({"name": "tls", "mountPath": _TLS, "readOnly": True})
    if _secret_files(what, part):
        container["volumeMounts"].append({"name": "files", "mountPath": _FILES, "readOnly": True})
    container["volumeMounts"] += [
        {"name": f"folder-{number}", "mountPath": path} for number, path in enumerate(what.written_folders(part))
    ]
    if what.secrets(part):
        container["envFrom"] = [{"secretRef": {"name": f"{what.name}-{part}-keys"}}]
    return container


def has_tls(what: Deployment, part: str) -> bool:
    """A part reads certificates: of clients' connections, or of those between servers and workers."""
    return (part == what.front and what.https) or (part != "gateway" and what.tls and bool(what.workers))


def _secret_files(what: Deployment, part: str) -> list[str]:
    """Names of the files with secrets that a part reads, without certificates of clients' connections."""
    return [*dict.fromkeys(what.files(part, certificate=False).values())]


def _file_flags(what: Deployment, part: str) -> list[str]:
    """Flags of a part that name files with secrets."""
    command = "serve" if part == "server" else part
    names = what.files(part, certificate=part == what.front)
    places = {key: f"{_TLS}/{_IN_TLS[key]}" if key in _IN_TLS else f"{_FILES}/{name}" for key, name in names.items()}
    return [word for key, path in places.items() for word in (spelled(command, key), path)]


def resources(what: Deployment, part: str) -> Manifest:
    """Memory and processors of a container; {} if they are not limited."""
    sizes: dict[str, str] = {}
    memory = what.worker_memory or what.memory if part == "worker" else what.memory
    if memory is not None:
        sizes["memory"] = memory + ("i" if memory[-1] in "KMGT" else "")
    if what.cpus is not None:
        sizes["cpu"] = f"{what.cpus:g}"
    return {"requests": sizes, "limits": dict(sizes)} if sizes else {}


def literal(word: str) -> str:
    """With `$(` doubled: Kubernetes puts variables in there."""
    return word.replace("$(", "$$(")


def _server(what: Deployment, rpc: list[str]) -> Manifest:
    more = _file_flags(what, "server")
    if what.tls and what.workers:
        more += [spelled("serve", "rpc_ca"), f"{_TLS}/ca.crt", spelled("serve", "rpc_cert"), f"{_TLS}/tls.crt"]
        more += [spelled("serve", "rpc_key"), f"{_TLS}/tls.key"]
    container = _container(what, "server", what.serve_command(*more, rpc=rpc, host="0.0.0.0"), what.port)
    container["env"] = _hosts(what, "group" if what.workers and what.leader_worker_set else "server")
    return {**container, **_http_probes(_START_SECONDS, prefix=what.prefix, tls=what.server_https)}


def _gateway(what: Deployment) -> Manifest:
    """The gateway has the names of all servers, also of those that the autoscaler may start."""
    group = what.workers and what.leader_worker_set
    home = f"{what.name}-group" if group else f"{what.name}-server"
    servers = [f"{home}-{i}.{home}:{what.port}" for i in range(most_replicas(what))]
    command = what.gateway_command(*_file_flags(what, "gateway"), servers=servers, host="0.0.0.0")
    container = _container(what, "gateway", command, what.port)
    container["env"] = _hosts(what, "gateway")
    return {**container, **_http_probes(_START_SECONDS, tls=what.https)}


def _hosts(what: Deployment, part: str) -> list[Manifest]:
    """Environment with the names of a service and its pods in the cluster: no DNS server outside can claim them."""
    names = what.allowed_hosts(f".{what.name}-{part}", ".svc", ".cluster.local")
    return [{"name": name, "value": value} for name, value in names.items()]


def _http_probes(start: int, *, prefix: str = "", tls: bool) -> Manifest:
    """Probes of a server that may take so many seconds to start."""

    def probe(path: str, period: int, failures: int, timeout: int) -> Manifest:
        get: Manifest = {"path": prefix + path, "port": "http"}
        if tls:
            get["scheme"] = "HTTPS"
        return {
            "httpGet": get, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": timeout
        }  # fmt: skip

    return {
        "startupProbe": probe(LIVE, 10, start // 10, 5),
        "livenessProbe": probe(LIVE, 30, 3, 10),
        "readinessProbe": probe(READY, 5, 2, 5),
        # the endpoint is taken out of the service before the process is told to end
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
    }


def _worker(what: Deployment) -> Manifest:
    more: list[str] = []
    if what.tls:
        for key, file in (("tls_cert", "tls.crt"), ("tls_key", "tls.key"), ("tls_client_ca", "ca.crt")):
            more += [spelled("worker", key), f"{_TLS}/{file}"]
    container = _container(what, "worker", what.worker_command(*more, host="0.0.0.0"), what.worker_port)
    # A frozen process accepts connections, too: it is asked for HELLO.
    greets: Manifest = {"exec": {"command": PROBE}}
    return {
        **container,
        "startupProbe": {**greets, "periodSeconds": 10, "failureThreshold": 30, "timeoutSeconds": 15},
        "livenessProbe": {**greets, "periodSeconds": 60, "failureThreshold": 3, "timeoutSeconds": 15},
    }


def _pod(what: Deployment, part: str, container: Manifest, *, own_cache: bool = False) -> Manifest:
    models = {"persistentVolumeClaim": {"claimName": f"{what.name}-models", "readOnly": True}}
    volumes: list[Manifest] = [{"name": "models", **models}, {"name": "tmp", "emptyDir": {}}]
    if not own_cache:
        volumes.append({"name": "cache", "emptyDir": {}})
    computes = part != "gateway"
    if not computes:
        volumes = [{"name": "tmp", "emptyDir": {}}]
    if has_tls(what, part):
        volumes.append({"name": "tls", "secret": {"secretName": f"{what.name}-tls", "defaultMode": 0o440}})
    if _secret_files(what, part):
        volumes.append({"name": "files", "secret": {"secretName": f"{what.name}-files", "defaultMode": 0o440}})
    volumes += [{"name": f"folder-{number}", "emptyDir": {}} for number, _ in enumerate(what.written_folders(part))]
    labels = _labels(what, part)
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    notes = _scraping(what) if part == "server" else {}
    quiet = {key: container[key] for key in ("image", "securityContext")}
    kernels = {
        "name": "kernels",
        **quiet,
        # those of the image, which the volume would hide
        "command": ["cp", "-r", f"{CACHE}/.", "/volume"],
        "volumeMounts": [{"name": "cache", "mountPath": "/volume"}],
    }
    return {
        "metadata": {"labels": labels, **({"annotations": notes} if notes else {})},
        "spec": {
            "terminationGracePeriodSeconds": _END_SECONDS,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [spread],
            **({"initContainers": [kernels]} if computes else {}),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _scraping(what: Deployment) -> dict[str, str]:
    """Annotations by which Prometheus finds the metrics of a pod."""
    notes = {"scrape": "true", "port": str(what.port), "path": f"{what.prefix}/metrics"}
    if what.server_https:
        notes["scheme"] = "https"
    return {f"prometheus.io/{key}": value for key, value in notes.items()}


# --- what runs them ---------------------------------------------------------------------------------------------------


def _servers(what: Deployment) -> Manifest:
    scheme = "tls://" if what.tls else ""
    rpc = [f"{scheme}{what.name}-worker-{i}.{what.name}-worker:{what.worker_port}" for i in range(what.workers)]
    pod = _pod(what, "server", _server(what, rpc))
    if what.gateway is None:
        return _rolling(what, "server", pod)
    return {  # each has a name, by which the gateway knows it
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(what, "server"),
        "spec": {
            "serviceName": f"{what.name}-server",
            **_replicas(what),
            "podManagementPolicy": "Parallel",
            "selector": _selector(what, "server"),
            "template": pod,
        },
    }


def _replicas(what: Deployment) -> dict[str, int]:
    """Number of servers, unless the autoscaler sets it."""
    return {} if scales(what) else {"replicas": what.replicas}


def _rolling(what: Deployment, part: str, pod: Manifest) -> Manifest:
    # Workers have room for the layers of so many servers, and of no other while these are replaced.
    surge = (
        {"maxUnavailable": 1, "maxSurge": 0}
        if part == "server" and what.workers
        else {"maxUnavailable": 0, "maxSurge": 1}
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(what, part),
        "spec": {
            **(_replicas(what) if part == "server" else {}),
            "selector": _selector(what, part),
            "strategy": {"type": "RollingUpdate", "rollingUpdate": surge},
            "progressDeadlineSeconds": _START_SECONDS + 60,
            "template": pod,
        },
    }


def _gateways(what: Deployment) -> Manifest:
    return _rolling(what, "gateway", _pod(what, "gateway", _gateway(what)))


def _workers(what: Deployment) -> Manifest:
    cache = {
        "metadata": {"name": "cache"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": CACHE_SIZE}}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(what, "worker"),
        "spec": {
            "serviceName": f"{what.name}-worker",
            "replicas": what.workers,
            "podManagementPolicy": "Parallel",
            "selector": _selector(what, "worker"),
            "template": _pod(what, "worker", _worker(what), own_cache=True),
            "volumeClaimTemplates": [cache],
        },
    }


def _leader_worker_set(what: Deployment) -> Manifest:
    """Groups of a server and its workers, which are scheduled together (leaderworkerset.x-k8s.io)."""
    scheme = "tls://" if what.tls else ""
    # a leader's pod is called SET-0, its workers SET-0-1, SET-0-2 …, all of them under the service SET
    rpc = ",".join(f"{scheme}$(LWS_GROUP)-{i + 1}.{what.name}-group:{what.worker_port}" for i in range(what.workers))
    server = _server(what, [])
    server["args"] += [spelled("serve", "rpc"), rpc]
    field = {"fieldRef": {"fieldPath": "metadata.name"}}
    server["env"] = [{"name": "LWS_GROUP", "valueFrom": field}, *server.get("env", [])]
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": f"{what.name}-group", "labels": _labels(what, "group")},
        "spec": {
            "replicas": what.replicas,
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": what.workers + 1,
                # a worker that comes back gets its layers again: the group need not be made anew
                "restartPolicy": "None",
                "leaderTemplate": _pod(what, "server", server),
                "workerTemplate": _pod(what, "worker", _worker(what)),
            },
        },
    }


def _service(what: Deployment, part: str) -> Manifest:
    port = {"name": "http", "port": what.port, "targetPort": "http"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(what, part),
        "spec": {"selector": _labels(what, part), "ports": [port]},
    }


def _server_service(what: Deployment) -> Manifest:
    """For clients; behind a gateway the names of single servers, ready or not: it looks at them itself."""
    service = _service(what, "server")
    if what.gateway is not None:
        service["spec"] = {"clusterIP": "None", "publishNotReadyAddresses": True, **service["spec"]}
    return service


def _gateway_service(what: Deployment) -> Manifest:
    return _service(what, "gateway")


def _worker_service(what: Deployment) -> Manifest:
    port = {"name": "rpc", "port": what.worker_port, "targetPort": "rpc"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(what, "worker"),
        # servers look for workers by name before these are ready
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(what, "worker"),
            "ports": [port],
        },
    }


def _budget(what: Deployment, part: str) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(what, part),
        "spec": {"maxUnavailable": 1, "selector": _selector(what, part)},
    }


def _scaler(what: Deployment) -> Manifest:
    """More servers while requests wait; the metric comes from Prometheus' adapter (`deploy prometheus`)."""
    group = bool(what.workers and what.leader_worker_set)
    target = (
        {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": f"{what.name}-group"}
        if group
        else {
            "apiVersion": "apps/v1",
            "kind": "Deployment" if what.gateway is None else "StatefulSet",
            "name": f"{what.name}-server",
        }
    )
    waiting = {
        "type": "Pods",
        "pods": {
            "metric": {"name": WAITING.replace(":", "_")},
            "target": {"type": "AverageValue", "averageValue": "2"},
        },
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": _meta(what, "server"),
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": what.replicas,
            "maxReplicas": most_replicas(what),
            "metrics": [waiting],
            # a model takes long to load: what was started is not ended at once
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 900}},
        },
    }


def most_replicas(what: Deployment) -> int:
    """To which number servers grow."""
    return max(4 * what.replicas, 4) if scales(what) else what.replicas


def _policies(what: Deployment) -> list[Manifest]:
    """Every pod of the cluster may ask servers, or the gateway before them.

    Workers accept servers and, for the ring and ALLREDUCE, each other: their protocol is not made for others.
    """

    def policy(part: str, origin: list[Manifest], port: int) -> Manifest:
        rule: Manifest = {"ports": [{"protocol": "TCP", "port": port}]}
        if origin:
            rule["from"] = origin
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": _meta(what, part),
            "spec": {"podSelector": _selector(what, part), "policyTypes": ["Ingress"], "ingress": [rule]},
        }

    # behind a gateway servers stay open to Prometheus, which scrapes them from another namespace perhaps
    parts = ("server",) if what.gateway is None else ("gateway", "server")
    found = [policy(part, [], what.port) for part in parts]
    if what.workers:
        origins = [{"podSelector": _selector(what, part)} for part in ("server", "worker")]
        found.append(policy("worker", origins, what.worker_port))
    return found


def _secret(name: str, kind: str, values: Mapping[str, str]) -> Manifest:
    """A secret; the operator fills in values that are empty."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": kind, "stringData": dict(values)}


def secrets(what: Deployment) -> list[Manifest]:
    """Secrets that the manifests want, without values that only the operator has ("")."""
    found: list[Manifest] = []
    parts = ("server", "gateway")
    for part in parts:
        if variables := what.secrets(part):
            found.append(_secret(f"{what.name}-{part}-keys", "Opaque", variables))
    if names := dict.fromkeys(name for part in parts for name in _secret_files(what, part)):
        found.append(_secret(f"{what.name}-files", "Opaque", {name: _content(what, name) for name in names}))
    if any(has_tls(what, part) for part in (*parts, "worker")):
        values = {_IN_TLS[name]: _content(what, name) for name in reversed(_IN_TLS)}
        more = {"ca.crt": ""} if what.tls and what.workers else {}
        found.append(_secret(f"{what.name}-tls", "kubernetes.io/tls", values | more))
    return found


def _content(what: Deployment, name: str) -> str:
    return read_secret(what.source(name)) or ""
