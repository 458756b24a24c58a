"""nginx before several servers: streams pass unbuffered, and what has not begun is tried on the next."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llamado.cluster.deploy.deployment import Deployment

_LARGEST_BODY = "64m"


def nginx(what: Deployment, servers: Sequence[str] = ()) -> dict[str, str]:
    """`nginx.conf` for servers at these addresses in the same network of compose, or at the ports of this machine, or
    for their gateway there.
    """
    n = what.replicas if what.front == "server" else 1
    addresses = servers or [f"127.0.0.1:{what.port + i}" for i in range(n)]
    members = "\n".join(f"        server {address} max_fails=2 fail_timeout=5s;" for address in addresses)
    # In compose nginx has the certificate; else what is behind it has it, too, and listens on loopback.
    behind = what.https and not servers
    scheme = "https" if behind else "http"
    verify = "\n            proxy_ssl_verify off;" if behind else ""
    listen, certificate = "listen 80;", ""
    if what.https:
        listen = "listen 443 ssl;\n        listen [::]:443 ssl;"
        cert, key = (
            f"/run/secrets/{name}" if servers else what.source(name) or f"/etc/{what.name}/{own}"
            for name, own in (("ssl_cert_file", "cert.pem"), ("ssl_key_file", "key.pem"))
        )
        certificate = f"\n        ssl_certificate {cert};\n        ssl_certificate_key {key};"
    # A gateway has no prefix: it adds that of the servers.
    prefix = re.escape(what.prefix) if what.front == "server" else ""
    about = "" if what.has_key else "# Without a key (--key) all who reach nginx may use the servers.\n"
    return {
        "nginx.conf": f"""\
{about}worker_processes auto;

events {{
    worker_connections 4096;
}}

http {{
    access_log /dev/stdout;
    error_log /dev/stderr warn;

    upstream {what.name} {{
        least_conn;
{members}
        keepalive 64;
    }}

    server {{
        {listen}{certificate}
        server_name {what.domain};
        client_max_body_size {_LARGEST_BODY};

        # For monitoring, which asks the servers themselves; /slots shows what others ask.
        location ~ ^{prefix}/(metrics|slots)(/|$) {{
            return 403;
        }}

        location / {{
            proxy_pass {scheme}://{what.name};{verify}
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
            proxy_set_header X-Real-IP $remote_addr;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $scheme;
            # tokens go on as they come
            proxy_buffering off;
            proxy_cache off;
            # an answer may take long before its first byte: a long prompt, a queue
            proxy_connect_timeout 5s;
            proxy_send_timeout 60s;
            proxy_read_timeout 3600s;
            # 503: loading, or its queue is full; nothing of an answer has been sent then
            proxy_next_upstream error http_502 http_503 non_idempotent;
            proxy_next_upstream_tries {max(2, len(addresses))};
        }}
    }}
}}
"""
    }
