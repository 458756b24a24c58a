"""nginx as a proxy for several servers: unbuffered streams, and retries on the next server before a response starts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llamado.cluster.deploy.deployment import Deployment

_LARGEST_BODY = "64m"


def nginx(deployment: Deployment, servers: Sequence[str] = ()) -> dict[str, str]:
    """Return `nginx.conf`. `servers`: addresses in the network of compose; default: the ports of this machine.

    With a gateway nginx passes requests to it instead of the servers.
    """
    n = deployment.replicas if deployment.front == "server" else 1
    addresses = servers or [f"127.0.0.1:{deployment.port + i}" for i in range(n)]
    members = "\n".join(f"        server {address} max_fails=2 fail_timeout=5s;" for address in addresses)
    # In compose only nginx has the certificate; otherwise the servers on loopback have it too.
    behind = deployment.https and not servers
    scheme = "https" if behind else "http"
    verify = "\n            proxy_ssl_verify off;" if behind else ""
    listen, certificate = "listen 80;", ""
    if deployment.https:
        listen = "listen 443 ssl;\n        listen [::]:443 ssl;"
        cert, key = (
            f"/run/secrets/{name}" if servers else deployment.source(name) or f"/etc/{deployment.name}/{own}"
            for name, own in (("ssl_cert_file", "cert.pem"), ("ssl_key_file", "key.pem"))
        )
        certificate = f"\n        ssl_certificate {cert};\n        ssl_certificate_key {key};"
    # The gateway itself has no prefix; it adds that of the servers.
    prefix = re.escape(deployment.prefix) if deployment.front == "server" else ""
    about = "" if deployment.has_key else "# No API key (--key): anyone who can reach nginx can use the servers.\n"
    return {
        "nginx.conf": f"""\
{about}worker_processes auto;

events {{
    worker_connections 4096;
}}

http {{
    access_log /dev/stdout;
    error_log /dev/stderr warn;

    upstream {deployment.name} {{
        least_conn;
{members}
        keepalive 64;
    }}

    server {{
        {listen}{certificate}
        server_name {deployment.domain};
        client_max_body_size {_LARGEST_BODY};

        # Monitoring reads these from the servers directly; /slots shows the prompts of others.
        location ~ ^{prefix}/(metrics|slots)(/|$) {{
            return 403;
        }}

        location / {{
            proxy_pass {scheme}://{deployment.name};{verify}
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
            proxy_set_header X-Real-IP $remote_addr;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $scheme;
            # pass tokens on at once
            proxy_buffering off;
            proxy_cache off;
            # a long prompt or a queue may delay the first byte
            proxy_connect_timeout 5s;
            proxy_send_timeout 60s;
            proxy_read_timeout 3600s;
            # 503: the server is loading or its queue is full; no part of a response has been sent
            proxy_next_upstream error http_502 http_503 non_idempotent;
            proxy_next_upstream_tries {max(2, len(addresses))};
        }}
    }}
}}
"""
    }
