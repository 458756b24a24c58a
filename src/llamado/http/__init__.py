"""HTTP layer shared by server, router and gateway: access control, request bodies, errors, connections, upstreams."""
