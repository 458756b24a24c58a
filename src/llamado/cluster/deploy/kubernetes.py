"""Kubernetes manifests: servers, workers and gateway with their services, probes, network policies and secrets.

The startup probe waits for the model. Readiness removes a server from the service while it cannot respond, for example
while a worker is lost. Liveness restarts only a process that no longer works, never for a lost worker: a restart would
not bring the worker back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamado.cluster.deploy.containers import CACHE, MODELS, PROBE, USER
from llamado.cluster.deploy.deployment import Deployment, SecretText, flag_name, path_flags, read_secret, yaml_text

LIVE, READY = "/livez", "/readyz"
CACHE_SIZE = "50Gi"
"""Size of the volume on which a worker caches received weights."""
_START_SECONDS = 1800
_END_SECONDS = 90
_TLS, _FILES = "/tls", "/files"
_IN_TLS = {"ssl_key_file": "tls.key", "ssl_cert_file": "tls.crt"}

WAITING = "llamacpp:requests_deferred"
"""Metric of the autoscaler. Names in Kubernetes have no colons."""

Manifest = dict[str, Any]


def kubernetes(deployment: Deployment) -> dict[str, str]:
    """Return a file with all manifests, and one with secrets if there are any (an example if values are missing)."""
    files = {f"{deployment.name}.yaml": yaml_text(*manifests(deployment))}
    if found := secrets(deployment):
        known = all(value for one in found for value in one["stringData"].values())
        name, about = f"{deployment.name}-secrets.yaml", "# Do not commit this file.\n"
        if not known:
            name, about = (
                f"{deployment.name}-secrets.example.yaml",
                "# Fill in the empty values in a copy of this file.\n",
            )
        files[name] = SecretText(about + yaml_text(*found))
    return files


def manifests(deployment: Deployment) -> list[Manifest]:
    """Return all manifests except secrets."""
    found = [_service(deployment, "server")]
    if deployment.workers and deployment.leader_worker_set:
        found.append(_leader_worker_set(deployment))
    else:
        found.append(_servers(deployment))
        if deployment.workers:
            found += [_service(deployment, "worker"), _workers(deployment)]
    if deployment.workers:
        found.append(_budget(deployment, "worker"))
    if deployment.gateway is not None:
        found += [_service(deployment, "gateway"), _gateways(deployment), _budget(deployment, "gateway")]
    found.append(_budget(deployment, "server"))
    if scales(deployment):
        found.append(_scaler(deployment))
    return [*found, *_policies(deployment)]


def scales(deployment: Deployment) -> bool:
    """Return True if servers may be scaled automatically: shared workers have memory for a fixed number."""
    return not deployment.workers or deployment.leader_worker_set


def _meta(deployment: Deployment, part: str) -> Manifest:
    return {"name": f"{deployment.name}-{part}", "labels": _labels(deployment, part)}


def _labels(deployment: Deployment, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": deployment.name, "app.kubernetes.io/component": part}


def _selector(deployment: Deployment, part: str) -> Manifest:
    return {"matchLabels": _labels(deployment, part)}


# --- containers -------------------------------------------------------------------------------------------------------


def _container(deployment: Deployment, part: str, command: list[str], port: int) -> Manifest:
    container: Manifest = {
        "name": part,
        "image": deployment.image,
        "args": [escape(word) for word in command],
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
    elif sizes := resources(deployment, part):
        container["resources"] = sizes
    if has_tls(deployment, part):
        container["volumeMounts"].append({"name": "tls", "mountPath": _TLS, "readOnly": True})
    if _secret_files(deployment, part):
        container["volumeMounts"].append({"name": "files", "mountPath": _FILES, "readOnly": True})
    container["volumeMounts"] += [
        {"name": f"folder-{number}", "mountPath": path} for number, path in enumerate(deployment.written_folders(part))
    ]
    if deployment.secrets(part):
        container["envFrom"] = [{"secretRef": {"name": f"{deployment.name}-{part}-keys"}}]
    return container


def has_tls(deployment: Deployment, part: str) -> bool:
    """Return True if a part needs certificates, for clients or for links between servers and workers."""
    return (part == deployment.front and deployment.https) or (
        part != "gateway" and deployment.tls and bool(deployment.workers)
    )


def _secret_files(deployment: Deployment, part: str) -> list[str]:
    """Return the names of a part's secret files, without the certificate for clients."""
    return [*dict.fromkeys(deployment.files(part, certificate=False).values())]


def _file_flags(deployment: Deployment, part: str) -> list[str]:
    """Return the flags of a part with the paths of its secret files."""
    names = deployment.files(part, certificate=part == deployment.front)
    places = {key: f"{_TLS}/{_IN_TLS[key]}" if key in _IN_TLS else f"{_FILES}/{name}" for key, name in names.items()}
    return path_flags(part, places)


def resources(deployment: Deployment, part: str) -> Manifest:
    """Return memory and CPUs of a container; {} without limits."""
    sizes: dict[str, str] = {}
    if memory := deployment.memory_limit(part):
        sizes["memory"] = memory + ("i" if memory[-1] in "KMGT" else "")
    if deployment.cpus is not None:
        sizes["cpu"] = f"{deployment.cpus:g}"
    return {"requests": sizes, "limits": dict(sizes)} if sizes else {}


def escape(word: str) -> str:
    """Escape `$(`, which Kubernetes would replace by variables."""
    return word.replace("$(", "$$(")


def _server(deployment: Deployment, rpc: list[str]) -> Manifest:
    more = _file_flags(deployment, "server")
    if deployment.tls and deployment.workers:
        more += [flag_name("serve", "rpc_ca"), f"{_TLS}/ca.crt", flag_name("serve", "rpc_cert"), f"{_TLS}/tls.crt"]
        more += [flag_name("serve", "rpc_key"), f"{_TLS}/tls.key"]
    container = _container(
        deployment, "server", deployment.serve_command(*more, rpc=rpc, host="0.0.0.0"), deployment.port
    )
    container["env"] = _hosts(deployment, "group" if deployment.workers and deployment.leader_worker_set else "server")
    return {**container, **_http_probes(_START_SECONDS, prefix=deployment.prefix, tls=deployment.server_https)}


def _gateway(deployment: Deployment) -> Manifest:
    """Return the gateway's container. It gets the names of all servers that the autoscaler may start."""
    group = deployment.workers and deployment.leader_worker_set
    home = f"{deployment.name}-group" if group else f"{deployment.name}-server"
    servers = [f"{home}-{i}.{home}:{deployment.port}" for i in range(most_replicas(deployment))]
    command = deployment.gateway_command(*_file_flags(deployment, "gateway"), servers=servers, host="0.0.0.0")
    container = _container(deployment, "gateway", command, deployment.port)
    container["env"] = _hosts(deployment, "gateway")
    return {**container, **_http_probes(_START_SECONDS, tls=deployment.https)}


def _hosts(deployment: Deployment, part: str) -> list[Manifest]:
    """Return the environment with allowed host names: those of a service and its pods.

    Only the cluster's DNS resolves these suffixes, so they are safe from DNS rebinding.
    """
    names = deployment.allowed_hosts(f".{deployment.name}-{part}", ".svc", ".cluster.local")
    return [{"name": name, "value": value} for name, value in names.items()]


def _http_probes(start: int, *, prefix: str = "", tls: bool) -> Manifest:
    """Return the probes of a server or gateway that may take `start` seconds to start."""

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
        # Removes the endpoint from the service before the process gets SIGTERM.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
    }


def _worker(deployment: Deployment) -> Manifest:
    more: list[str] = []
    if deployment.tls:
        for key, file in (("tls_cert", "tls.crt"), ("tls_key", "tls.key"), ("tls_client_ca", "ca.crt")):
            more += [flag_name("worker", key), f"{_TLS}/{file}"]
    container = _container(
        deployment, "worker", deployment.worker_command(*more, host="0.0.0.0"), deployment.worker_port
    )
    # A frozen process also accepts connections, so the probe sends HELLO.
    greets: Manifest = {"exec": {"command": PROBE}}
    return {
        **container,
        "startupProbe": {**greets, "periodSeconds": 10, "failureThreshold": 30, "timeoutSeconds": 15},
        "livenessProbe": {**greets, "periodSeconds": 60, "failureThreshold": 3, "timeoutSeconds": 15},
    }


def _pod(deployment: Deployment, part: str, container: Manifest, *, own_cache: bool = False) -> Manifest:
    models = {"persistentVolumeClaim": {"claimName": f"{deployment.name}-models", "readOnly": True}}
    volumes: list[Manifest] = [{"name": "models", **models}, {"name": "tmp", "emptyDir": {}}]
    if not own_cache:
        volumes.append({"name": "cache", "emptyDir": {}})
    computes = part != "gateway"
    if not computes:
        volumes = [{"name": "tmp", "emptyDir": {}}]
    if has_tls(deployment, part):
        volumes.append({"name": "tls", "secret": {"secretName": f"{deployment.name}-tls", "defaultMode": 0o440}})
    if _secret_files(deployment, part):
        volumes.append({"name": "files", "secret": {"secretName": f"{deployment.name}-files", "defaultMode": 0o440}})
    volumes += [
        {"name": f"folder-{number}", "emptyDir": {}} for number, _ in enumerate(deployment.written_folders(part))
    ]
    labels = _labels(deployment, part)
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    notes = _scraping(deployment) if part == "server" else {}
    quiet = {key: container[key] for key in ("image", "securityContext")}
    kernels = {
        "name": "kernels",
        **quiet,
        # Copies the image's compiled kernels, which the volume would hide.
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


def _scraping(deployment: Deployment) -> dict[str, str]:
    """Return the annotations that let Prometheus find the metrics of a pod."""
    notes = {"scrape": "true", "port": str(deployment.port), "path": f"{deployment.prefix}/metrics"}
    if deployment.server_https:
        notes["scheme"] = "https"
    return {f"prometheus.io/{key}": value for key, value in notes.items()}


# --- workloads and services -------------------------------------------------------------------------------------------


def _servers(deployment: Deployment) -> Manifest:
    scheme, home = "tls://" if deployment.tls else "", f"{deployment.name}-worker"
    rpc = [f"{scheme}{home}-{i}.{home}:{deployment.worker_port}" for i in range(deployment.workers)]
    pod = _pod(deployment, "server", _server(deployment, rpc))
    if deployment.gateway is None:
        return _rolling(deployment, "server", pod)
    return _stateful_set(deployment, "server", _replicas(deployment), pod)  # the gateway needs stable names


def _stateful_set(deployment: Deployment, part: str, replicas: dict[str, int], pod: Manifest, **more: Any) -> Manifest:
    """Return a StatefulSet. `replicas`: their entry of the spec; `more`: further entries."""
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(deployment, part),
        "spec": {
            "serviceName": f"{deployment.name}-{part}",
            **replicas,
            "podManagementPolicy": "Parallel",
            "selector": _selector(deployment, part),
            "template": pod,
            **more,
        },
    }


def _replicas(deployment: Deployment) -> dict[str, int]:
    """Return the number of servers as an entry of the spec; {} if the autoscaler sets it."""
    return {} if scales(deployment) else {"replicas": deployment.replicas}


def _rolling(deployment: Deployment, part: str, pod: Manifest) -> Manifest:
    # Shared workers have no memory for the layers of an additional server during an update.
    surge = (
        {"maxUnavailable": 1, "maxSurge": 0}
        if part == "server" and deployment.workers
        else {"maxUnavailable": 0, "maxSurge": 1}
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(deployment, part),
        "spec": {
            **(_replicas(deployment) if part == "server" else {}),
            "selector": _selector(deployment, part),
            "strategy": {"type": "RollingUpdate", "rollingUpdate": surge},
            "progressDeadlineSeconds": _START_SECONDS + 60,
            "template": pod,
        },
    }


def _gateways(deployment: Deployment) -> Manifest:
    return _rolling(deployment, "gateway", _pod(deployment, "gateway", _gateway(deployment)))


def _workers(deployment: Deployment) -> Manifest:
    cache = {
        "metadata": {"name": "cache"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": CACHE_SIZE}}},
    }
    pod = _pod(deployment, "worker", _worker(deployment), own_cache=True)
    replicas = {"replicas": deployment.workers}
    return _stateful_set(deployment, "worker", replicas, pod, volumeClaimTemplates=[cache])


def _leader_worker_set(deployment: Deployment) -> Manifest:
    """Return a LeaderWorkerSet: groups of a server and its workers, scheduled together (leaderworkerset.x-k8s.io)."""
    scheme = "tls://" if deployment.tls else ""
    # Pod names: the leader SET-0, its workers SET-0-1, SET-0-2 …, all in the service SET.
    rpc = ",".join(
        f"{scheme}$(LWS_GROUP)-{i + 1}.{deployment.name}-group:{deployment.worker_port}"
        for i in range(deployment.workers)
    )
    server = _server(deployment, [])
    server["args"] += [flag_name("serve", "rpc"), rpc]
    field = {"fieldRef": {"fieldPath": "metadata.name"}}
    server["env"] = [{"name": "LWS_GROUP", "valueFrom": field}, *server.get("env", [])]
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": f"{deployment.name}-group", "labels": _labels(deployment, "group")},
        "spec": {
            "replicas": deployment.replicas,
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": deployment.workers + 1,
                # A restarted worker gets its layers back, so the group need not be recreated.
                "restartPolicy": "None",
                "leaderTemplate": _pod(deployment, "server", server),
                "workerTemplate": _pod(deployment, "worker", _worker(deployment)),
            },
        },
    }


def _service(deployment: Deployment, part: str) -> Manifest:
    """Return the service of a part: headless for workers, and for servers behind a gateway.

    Headless services list pods that are not ready: servers resolve the names of workers before these are ready, and the
    gateway checks the readiness of servers itself.
    """
    name, number = ("rpc", deployment.worker_port) if part == "worker" else ("http", deployment.port)
    is_headless = part == "worker" or (part == "server" and deployment.gateway is not None)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(deployment, part),
        "spec": {
            **({"clusterIP": "None", "publishNotReadyAddresses": True} if is_headless else {}),
            "selector": _labels(deployment, part),
            "ports": [{"name": name, "port": number, "targetPort": name}],
        },
    }


def _budget(deployment: Deployment, part: str) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(deployment, part),
        "spec": {"maxUnavailable": 1, "selector": _selector(deployment, part)},
    }


def _scaler(deployment: Deployment) -> Manifest:
    """Return the autoscaler: more servers while requests wait.

    The metric comes from the Prometheus adapter (`deploy prometheus`).
    """
    group = bool(deployment.workers and deployment.leader_worker_set)
    target = (
        {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": f"{deployment.name}-group"}
        if group
        else {
            "apiVersion": "apps/v1",
            "kind": "Deployment" if deployment.gateway is None else "StatefulSet",
            "name": f"{deployment.name}-server",
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
        "metadata": _meta(deployment, "server"),
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": deployment.replicas,
            "maxReplicas": most_replicas(deployment),
            "metrics": [waiting],
            # Loading a model takes long, so keep new servers for a while.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 900}},
        },
    }


def most_replicas(deployment: Deployment) -> int:
    """Return the maximum number of servers."""
    return max(4 * deployment.replicas, 4) if scales(deployment) else deployment.replicas


def _policies(deployment: Deployment) -> list[Manifest]:
    """Return the network policies: any pod may connect to servers and the gateway.

    Workers accept only servers and, for the ring and ALLREDUCE, each other: their protocol is not for other clients.
    """

    def policy(part: str, origin: list[Manifest], port: int) -> Manifest:
        rule: Manifest = {"ports": [{"protocol": "TCP", "port": port}]}
        if origin:
            rule["from"] = origin
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": _meta(deployment, part),
            "spec": {"podSelector": _selector(deployment, part), "policyTypes": ["Ingress"], "ingress": [rule]},
        }

    # Servers behind a gateway stay reachable for Prometheus, which may run in another namespace.
    parts = ("server",) if deployment.gateway is None else ("gateway", "server")
    found = [policy(part, [], deployment.port) for part in parts]
    if deployment.workers:
        origins = [{"podSelector": _selector(deployment, part)} for part in ("server", "worker")]
        found.append(policy("worker", origins, deployment.worker_port))
    return found


def _secret(name: str, kind: str, values: Mapping[str, str]) -> Manifest:
    """Return a Secret. The operator fills in empty values."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": kind, "stringData": dict(values)}


def secrets(deployment: Deployment) -> list[Manifest]:
    """Return the Secrets that the manifests refer to. Values that the operator must fill in are ""."""
    found: list[Manifest] = []
    parts = ("server", "gateway")
    for part in parts:
        if variables := deployment.secrets(part):
            found.append(_secret(f"{deployment.name}-{part}-keys", "Opaque", variables))
    if names := dict.fromkeys(name for part in parts for name in _secret_files(deployment, part)):
        found.append(
            _secret(f"{deployment.name}-files", "Opaque", {name: _content(deployment, name) for name in names})
        )
    if any(has_tls(deployment, part) for part in (*parts, "worker")):
        values = {_IN_TLS[name]: _content(deployment, name) for name in reversed(_IN_TLS)}
        more = {"ca.crt": ""} if deployment.tls and deployment.workers else {}
        found.append(_secret(f"{deployment.name}-tls", "kubernetes.io/tls", values | more))
    return found


def _content(deployment: Deployment, name: str) -> str:
    return read_secret(deployment.source(name)) or ""
