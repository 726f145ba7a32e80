#!/bin/sh
# scripts/dev/install.sh ARGUMENTS: pip install ARGUMENTS into .venv, by uv if it is there (seconds), else by pip (minutes).
# uv reads none of pip's settings, so the folder in which pip looks for wheels is passed on.
set -eu
cd "$(dirname "$0")/../.."
python=.venv/bin/python
if [ -x .venv/bin/uv ]; then
  wheels=${PIP_FIND_LINKS:-$("$python" -m pip config get global.find-links 2>/dev/null || true)}
  UV_FIND_LINKS=${UV_FIND_LINKS:-$wheels} exec .venv/bin/uv pip install --quiet --python "$python" "$@"
fi
exec "$python" -m pip install --quiet --disable-pip-version-check "$@"
