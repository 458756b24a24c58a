"""Prometheus: what to scrape and when to call; Grafana: a dashboard of the same numbers."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from llamado.cluster.deploy.deployment import Deployment, SecretText, yaml_text
from llamado.cluster.deploy.kubernetes import WAITING

_KEY = "prometheus.key"
"""File of the key with which Prometheus asks servers."""


class Alert(NamedTuple):
    """When `expression` has been true for so long, `says` is told."""

    name: str
    expression: str
    lasts: str
    severity: str
    says: str


ALERTS = (
    Alert("LlamadoDown", "up{{job='{job}'}} == 0", "2m", "critical",
          "{{{{ $labels.instance }}}} does not answer /metrics: llamado doctor {url}"),
    Alert("LlamadoQueueGrows", "min_over_time(llamacpp:requests_deferred{{job='{job}'}}[5m]) > 0", "5m", "warning",
          "{{{{ $labels.instance }}}}: requests have been waiting for a slot for five minutes: more -np, or more "
          "replicas"),
    Alert("LlamadoSlowFirstToken",
          "histogram_quantile(0.95, sum by (le, instance) "
          "(rate(llamacpp:time_to_first_token_seconds_bucket{{job='{job}'}}[5m]))) > 10", "10m", "warning",
          "{{{{ $labels.instance }}}}: one of twenty requests waits for more than 10 s for its first token"),
    Alert("LlamadoErrors",
          "sum by (instance) (rate(llamacpp:http_requests_total{{job='{job}',status=~'5..'}}[5m])) / "
          "sum by (instance) (rate(llamacpp:http_requests_total{{job='{job}'}}[5m])) > 0.05 "
          # Clients of a server that loads its model get 503; the rate holds these for another five minutes.
          "unless on (instance) max_over_time(llamado_is_loading{{job='{job}'}}[5m]) == 1", "5m", "critical",
          "{{{{ $labels.instance }}}}: one of twenty answers is an error: llamado doctor LOGFILE"),
    Alert("LlamadoRestarts", "changes(process_start_time_seconds{{job='{job}'}}[30m]) > 2", "0m", "critical",
          "{{{{ $labels.instance }}}} ended and was started three times within half an hour: llamado doctor LOGFILE"),
    Alert("LlamadoCacheFull", "llamacpp:kv_cache_usage_ratio{{job='{job}'}} > 0.95", "10m", "warning",
          "{{{{ $labels.instance }}}}: the K/V cache is full: more -c, or -ctk q8_0 -ctv q8_0"),
    Alert("LlamadoStalled",
          "llamacpp:requests_processing{{job='{job}'}} > 0 and "
          "rate(llamacpp:n_decode_total{{job='{job}'}}[5m]) == 0", "5m", "critical",
          "{{{{ $labels.instance }}}}: requests are at work and nothing is computed: a worker is away or frozen"),
)  # fmt: skip


class Panel(NamedTuple):
    """A drawing: lines, each an expression and its name."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


_RATE = 'rate({metric}{{job="$job",instance=~"$instance"}}[$__rate_interval])'
_NOW = '{metric}{{job="$job",instance=~"$instance"}}'


def _rate(metric: str) -> str:
    return _RATE.format(metric=metric)


def _now(metric: str) -> str:
    return _NOW.format(metric=metric)


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le) ({_rate(metric + '_bucket')}))"


def _of_time(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(share, metric), f"{100 * share:.0f}%") for share in (0.5, 0.95, 0.99))


PANELS = (
    Panel("Tokens generated", "short", ((_rate("llamacpp:tokens_predicted_total"), "{{instance}}"),)),
    Panel("Prompt tokens", "short", (
        (_rate("llamacpp:prompt_tokens_total"), "{{instance}} computed"),
        (_rate("llamacpp:prompt_tokens_cached_total"), "{{instance}} from the cache"),
    )),
    Panel("Requests at work and waiting", "short", (
        (_now("llamacpp:requests_processing"), "{{instance}} at work"),
        (_now("llamacpp:requests_deferred"), "{{instance}} waiting"),
    )),
    Panel("K/V cache in use", "percentunit", ((_now("llamacpp:kv_cache_usage_ratio"), "{{instance}}"),)),
    Panel("Time to the first token", "s", _of_time("llamacpp:time_to_first_token_seconds")),
    Panel("Time from token to token", "s", _of_time("llamacpp:inter_token_latency_seconds")),
    Panel("Time in the queue", "s", _of_time("llamacpp:request_queue_time_seconds")),
    Panel("Busy slots a forward pass", "short", ((_now("llamacpp:n_busy_slots_per_decode"), "{{instance}}"),)),
    Panel("Answers by status", "reqps", ((
        f"sum by (status) ({_rate('llamacpp:http_requests_total')})", "{{status}}"),)),
    Panel("Memory of the process", "bytes", ((_now("process_resident_memory_bytes"), "{{instance}}"),)),
)  # fmt: skip


def prometheus(what: Deployment) -> dict[str, str]:
    """A configuration that scrapes the servers of this machine, alerts, and what Kubernetes' autoscaler needs."""
    rules = f"{what.name}.rules.yml"
    job: dict[str, Any] = {
        "job_name": what.name,
        "metrics_path": f"{what.prefix}/metrics",
        "static_configs": [{"targets": [f"127.0.0.1:{what.server_port + i}" for i in range(what.replicas)]}],
    }
    if what.server_https:
        job |= {"scheme": "https", "tls_config": {"insecure_skip_verify": True}}
    files: dict[str, str] = {}
    about = ""
    if what.server_has_key:
        job["authorization"] = {"credentials_file": f"/etc/{what.name}/{_KEY}"}
        files[_KEY if what.first_key else f"{_KEY}.example"] = SecretText(f"{what.first_key}\n")
        filled = "" if what.first_key else "   # with a key of the servers in it"
        about = f"# install -D -o prometheus -m 400 {_KEY} /etc/{what.name}/{_KEY}{filled}\n"
    configuration = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [rules],
        "scrape_configs": [job],
    }
    url = f"{job.get('scheme', 'http')}://{{{{ $labels.instance }}}}{what.prefix}"
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expression.format(job=what.name),
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.says.format(url=url)},
        }
        for alert in ALERTS
    ]
    groups = {"groups": [{"name": what.name, "rules": alerts}]}
    return {
        "prometheus.yml": about + yaml_text(configuration),
        rules: yaml_text(groups),
        "adapter-values.yaml": yaml_text(_adapter()),
        **files,
    }


def _adapter() -> dict[str, Any]:
    """Values of the chart prometheus-adapter (github.com/kubernetes-sigs/prometheus-adapter, docs/config.md) with which
    the autoscaler of `deploy kubernetes` sees how many requests wait in each pod.
    """
    rule = {
        "seriesQuery": f'{{__name__="{WAITING}",namespace!="",pod!=""}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"matches": ".*", "as": WAITING.replace(":", "_")},
        "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)",
    }
    return {"rules": {"default": False, "custom": [rule]}}


def grafana(what: Deployment) -> dict[str, str]:
    """A dashboard that Grafana imports; it asks which Prometheus to use."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": source,
            "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + i), "datasource": source, "expr": expression, "legendFormat": legend}
                for i, (expression, legend) in enumerate(panel.lines)
            ],
        }
        for number, panel in enumerate(PANELS)
    ]
    choices = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {"name": "job", "type": "textbox", "query": what.name, "current": {"text": what.name, "value": what.name}},
        {"name": "instance", "type": "query", "datasource": source, "includeAll": True, "multi": True, "refresh": 2,
         "allValue": ".*", "current": {"text": "All", "value": "$__all"},
         "query": {"query": 'label_values(up{job="$job"}, instance)', "refId": "instance"}},
    ]  # fmt: skip
    dashboard = {
        "uid": what.name,
        "title": f"llamado: {what.name}",
        "tags": ["llamado"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": choices},
        "panels": panels,
    }
    return {f"{what.name}-dashboard.json": json.dumps(dashboard, indent=2) + "\n"}
