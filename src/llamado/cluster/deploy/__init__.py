"""Deployment files for other programs: containers, systemd units, Kubernetes manifests, proxies, dashboards."""
