"""`llamado deploy`: files with which compose, systemd, Kubernetes and others run servers and workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llamado.flags import Parsed


def run_deploy(flags: Parsed, target: str, serve: Sequence[str]) -> int:
    """Print the files of a target, or write them; `serve`: flags of `llamado serve`. Raises FlagError and
    DeploymentError.
    """
    from llamado.cluster.deploy.deployment import Deployment
    from llamado.cluster.deploy.targets import files_for, write

    what = Deployment(
        serve=tuple(serve),
        name=flags.name,
        replicas=flags.replicas,
        workers=flags.workers,
        port=flags.port,
        worker_port=flags.worker_port,
        image=flags.image,
        program=flags.program,
        models=flags.models,
        memory=flags.memory,
        cpus=flags.cpus,
        tls=flags.tls,
        key=flags.key,
        domain=flags.domain,
        leader_worker_set=flags.lws,
    )
    files = files_for(target, what)
    if flags.out:
        for path in write(files, Path(flags.out)):
            print(path)
    elif len(files) == 1:
        print(*files.values(), end="")
    else:
        print("\n".join(f"# --- {name}\n{text}" for name, text in files.items()), end="")
    return 0
