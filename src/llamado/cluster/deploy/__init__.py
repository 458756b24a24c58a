"""Files with which other programs run servers and workers: containers, units, proxies, dashboards."""
