"""HTTP that the server and the router have in common: who may call, bodies, errors, whole answers."""
