#!/usr/bin/env bash
# `llamado up --on ray` over three nodes of Ray on this machine, in an environment of its own (.venv-ray): Ray brings far
# more than this project needs. Besides Ray it has what .venv has. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

stamp=.venv-ray/.installed
if [ ! -x .venv-ray/bin/python ] || [ pyproject.toml -nt "$stamp" ]; then
  [ -x .venv-ray/bin/python ] || "${PYTHON:-python3}" -m venv .venv-ray
  packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
  project="$(packages .venv/bin/python)"
  echo "import site; site.addsitedir('$project')" >"$(packages .venv-ray/bin/python)/project.pth"
  ray="$(.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"])')"
  .venv-ray/bin/python -m pip install -qq --disable-pip-version-check $ray </dev/null
  touch "$stamp"
fi
.venv-ray/bin/python -m pytest -q -o cache_dir=.venv-ray/.pytest_cache tests/on_ray "$@"
