"""Monitoring: scrape configuration and alerts for Prometheus, and a dashboard for Grafana."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from llamado.cluster.deploy.deployment import Deployment, SecretText, yaml_text
from llamado.cluster.deploy.kubernetes import WAITING

_KEY = "prometheus.key"
"""File with the API key for Prometheus's requests to servers."""


class Alert(NamedTuple):
    """An alert: fires after `expression` has been true for `duration`, with the text `summary`."""

    name: str
    expression: str
    duration: str
    severity: str
    summary: str


ALERTS = (
    Alert("LlamadoDown", "up{{job='{job}'}} == 0", "2m", "critical",
          "{{{{ $labels.instance }}}} does not answer /metrics: llamado doctor {url}"),
    Alert("LlamadoQueueGrows", "min_over_time(llamacpp:requests_deferred{{job='{job}'}}[5m]) > 0", "5m", "warning",
          "{{{{ $labels.instance }}}}: requests have been waiting for a slot for five minutes: increase -np or add "
          "replicas"),
    Alert("LlamadoSlowFirstToken",
          "histogram_quantile(0.95, sum by (le, instance) "
          "(rate(llamacpp:time_to_first_token_seconds_bucket{{job='{job}'}}[5m]))) > 10", "10m", "warning",
          "{{{{ $labels.instance }}}}: 5% of requests wait more than 10 s for their first token"),
    Alert("LlamadoErrors",
          "sum by (instance) (rate(llamacpp:http_requests_total{{job='{job}',status=~'5..'}}[5m])) / "
          "sum by (instance) (rate(llamacpp:http_requests_total{{job='{job}'}}[5m])) > 0.05 "
          # A server returns 503 while it loads its model; the rate includes these for another five minutes.
          "unless on (instance) max_over_time(llamado_is_loading{{job='{job}'}}[5m]) == 1", "5m", "critical",
          "{{{{ $labels.instance }}}}: more than 5% of responses are errors: llamado doctor LOGFILE"),
    Alert("LlamadoRestarts", "changes(process_start_time_seconds{{job='{job}'}}[30m]) > 2", "0m", "critical",
          "{{{{ $labels.instance }}}} was restarted three times within 30 minutes: llamado doctor LOGFILE"),
    Alert("LlamadoCacheFull", "llamacpp:kv_cache_usage_ratio{{job='{job}'}} > 0.95", "10m", "warning",
          "{{{{ $labels.instance }}}}: the KV cache is full: increase -c, or use -ctk q8_0 -ctv q8_0"),
    Alert("LlamadoStalled",
          "llamacpp:requests_processing{{job='{job}'}} > 0 and "
          "rate(llamacpp:n_decode_total{{job='{job}'}}[5m]) == 0", "5m", "critical",
          "{{{{ $labels.instance }}}}: requests are running but nothing is computed: a worker is lost or frozen"),
)  # fmt: skip


class Panel(NamedTuple):
    """A dashboard panel: its lines, each an expression and a legend."""

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
    Panel("Requests running and waiting", "short", (
        (_now("llamacpp:requests_processing"), "{{instance}} running"),
        (_now("llamacpp:requests_deferred"), "{{instance}} waiting"),
    )),
    Panel("KV cache in use", "percentunit", ((_now("llamacpp:kv_cache_usage_ratio"), "{{instance}}"),)),
    Panel("Time to the first token", "s", _of_time("llamacpp:time_to_first_token_seconds")),
    Panel("Time between tokens", "s", _of_time("llamacpp:inter_token_latency_seconds")),
    Panel("Time in the queue", "s", _of_time("llamacpp:request_queue_time_seconds")),
    Panel("Busy slots per forward pass", "short", ((_now("llamacpp:n_busy_slots_per_decode"), "{{instance}}"),)),
    Panel("Responses by status", "reqps", ((
        f"sum by (status) ({_rate('llamacpp:http_requests_total')})", "{{status}}"),)),
    Panel("Memory of the process", "bytes", ((_now("process_resident_memory_bytes"), "{{instance}}"),)),
)  # fmt: skip


def prometheus(deployment: Deployment) -> dict[str, str]:
    """Return a scrape configuration for servers on this machine, alerts, and the rule for the Kubernetes autoscaler."""
    rules = f"{deployment.name}.rules.yml"
    job: dict[str, Any] = {
        "job_name": deployment.name,
        "metrics_path": f"{deployment.prefix}/metrics",
        "static_configs": [
            {"targets": [f"127.0.0.1:{deployment.server_port + i}" for i in range(deployment.replicas)]}
        ],
    }
    if deployment.server_https:
        job |= {"scheme": "https", "tls_config": {"insecure_skip_verify": True}}
    files: dict[str, str] = {}
    about = ""
    if deployment.server_has_key:
        job["authorization"] = {"credentials_file": f"/etc/{deployment.name}/{_KEY}"}
        files[_KEY if deployment.first_key else f"{_KEY}.example"] = SecretText(f"{deployment.first_key}\n")
        filled = "" if deployment.first_key else "   # after writing one of the servers' keys into it"
        about = f"# install -D -o prometheus -m 400 {_KEY} /etc/{deployment.name}/{_KEY}{filled}\n"
    configuration = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [rules],
        "scrape_configs": [job],
    }
    url = f"{job.get('scheme', 'http')}://{{{{ $labels.instance }}}}{deployment.prefix}"
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expression.format(job=deployment.name),
            "for": alert.duration,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary.format(url=url)},
        }
        for alert in ALERTS
    ]
    groups = {"groups": [{"name": deployment.name, "rules": alerts}]}
    return {
        "prometheus.yml": about + yaml_text(configuration),
        rules: yaml_text(groups),
        "adapter-values.yaml": yaml_text(_adapter()),
        **files,
    }


def _adapter() -> dict[str, Any]:
    """Return values for the chart prometheus-adapter (github.com/kubernetes-sigs/prometheus-adapter, docs/config.md).

    They give the autoscaler of `deploy kubernetes` the number of waiting requests per pod.
    """
    rule = {
        "seriesQuery": f'{{__name__="{WAITING}",namespace!="",pod!=""}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"matches": ".*", "as": WAITING.replace(":", "_")},
        "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)",
    }
    return {"rules": {"default": False, "custom": [rule]}}


def grafana(deployment: Deployment) -> dict[str, str]:
    """Return a dashboard for import into Grafana; the user selects the Prometheus data source."""
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
        {"name": "job", "type": "textbox", "query": deployment.name,
         "current": {"text": deployment.name, "value": deployment.name}},
        {"name": "instance", "type": "query", "datasource": source, "includeAll": True, "multi": True, "refresh": 2,
         "allValue": ".*", "current": {"text": "All", "value": "$__all"},
         "query": {"query": 'label_values(up{job="$job"}, instance)', "refId": "instance"}},
    ]  # fmt: skip
    dashboard = {
        "uid": deployment.name,
        "title": f"llamado: {deployment.name}",
        "tags": ["llamado"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": choices},
        "panels": panels,
    }
    return {f"{deployment.name}-dashboard.json": json.dumps(dashboard, indent=2) + "\n"}
