#!/usr/bin/env bash
# Makes .venv what the locks say: `scripts/setup.sh` for running, `scripts/setup.sh test` with the tools and the Debian packages of the tests.
# A second run finds the stamp and does nothing. Everything comes from the locks with hashes, also what builds the editable install.
set -euo pipefail
set -m  # a stage is a process group of its own: Ctrl-C ends it through the trap below, and it can clean up
cd "$(dirname "$0")/.."
want=${1:-run}
lock=requirements.lock; [ "$want" = test ] && lock=requirements-test.lock
packages=(chromium fonts-noto-cjk curl tesseract-ocr)  # a real browser for the page's tests, glyphs for its Chinese, the README's client, a reader of scans
log=

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $1"; shift; for line in "$@"; do say "  $line"; done; exit 1; }

# Runs a command while a line on the terminal counts its seconds; what it prints is shown only where it fails.
stage() {
  local title=$1 begun=$SECONDS shown=0 pid status; shift
  "$@" >"$log" 2>&1 </dev/null & pid=$!
  trap 'kill -INT -- "-$pid" 2>/dev/null; wait "$pid" || true; say; say "Stopped. The same command goes on from here."; exit 130' INT TERM HUP
  [ -t 2 ] || printf '%s ...\n' "$title" >&2
  while kill -0 "$pid" 2>/dev/null; do
    if [ -t 2 ]; then printf '\r%s ... %d s' "$title" $((SECONDS - begun)) >&2
    elif [ $((SECONDS - begun - shown)) -ge 15 ]; then shown=$((SECONDS - begun)); printf '  %d s\n' "$shown" >&2; fi
    sleep 0.2 & wait $! || true
  done
  status=0; wait "$pid" || status=$?
  trap - INT TERM HUP
  if [ -t 2 ]; then printf '\r%s: %d s   \n' "$title" $((SECONDS - begun)) >&2; else printf '%s: %d s\n' "$title" $((SECONDS - begun)) >&2; fi
  return "$status"
}

# What an interpreter says of itself: its version, and `optimised` where it was built with profile-guided optimisation, which takes a fifth off the
# gateway's own code. Distributions build theirs so and need not say it; what pyenv builds is plain unless it was asked for more.
kind_of() {
  "$1" -c 'import os, sys, sysconfig
said = sysconfig.get_config_var("CONFIG_ARGS") or ""
system = os.path.realpath(sys.executable).startswith("/usr/bin/")
print("%d.%d" % sys.version_info[:2], "optimised" if "--enable-optimizations" in said or system else "plain")' 2>/dev/null
}

# The first interpreter that runs, is new enough and can make environments; of those of its version rather an optimised one. A name on PATH may be a
# shim that does not run.
find_python() {
  local name kind found='' lacks='' first='' version=''
  for name in ${PYTHON:-python3.11 /usr/bin/python3.11 python3 /usr/bin/python3 python3.12 python3.13}; do
    "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || { "$name" -V >/dev/null 2>&1 && found="$found $("$name" -V 2>&1 | cut -d' ' -f2)"; continue; }
    "$name" -c 'import ensurepip, venv' >/dev/null 2>&1 || { lacks=$name; continue; }
    kind=$(kind_of "$name") || kind=''
    [ -n "$first" ] || { first=$name; version=${kind% *}; }
    [ "$kind" != "$version optimised" ] || { echo "$name"; return; }
  done
  [ -z "$first" ] || { echo "$first"; return; }
  [ -z "$lacks" ] || die "$lacks cannot make virtual environments: its venv or ensurepip module is missing." "On Debian and Ubuntu: apt-get install python3-venv"
  die "Python 3.11 or newer is needed.${found:+ Found:$found.}" "On Debian 12 and Ubuntu 24.04: apt-get install python3 python3-venv" "Another place: make ${want/run/up} PYTHON=/path/to/python3.11"
}

pip_failed() {
  tail -n 15 "$log" >&2
  if grep -qiE 'connection|temporary failure|timed out|name or service|network|could not find a version' "$log"; then
    die "The packages could not be fetched." "Is there a network, and can pip reach its package index (see 'pip config list')?" "Run the same command again: what was fetched is kept."
  elif grep -qi 'no space left' "$log"; then die "The disk is full." "About 1.5 GB is needed beside this file: $PWD"
  elif grep -qi 'permission denied' "$log"; then die "No permission to write $PWD/.venv." "Is this checkout yours? Clone it into a folder of your own."
  else die "The installation failed; the lines above say why." "Nothing is half done: run the same command again."; fi
}

missing_packages() {
  command -v chromium >/dev/null || echo chromium
  { command -v fc-list >/dev/null && fc-list ':lang=zh' | grep -q .; } || echo fonts-noto-cjk
  command -v curl >/dev/null || echo curl
  command -v tesseract >/dev/null || echo tesseract-ocr
}

install_packages() {
  local missing as=()
  mapfile -t missing < <(missing_packages)
  [ ${#missing[@]} -gt 0 ] || return 0
  say "The tests need Debian packages that are missing here: ${missing[*]}"
  if [ "$(id -u)" != 0 ]; then
    if sudo -n true 2>/dev/null; then as=(sudo -n); else die "Only root can install them." "Ask for: apt-get install ${packages[*]}"; fi
  fi
  command -v apt-get >/dev/null || die "There is no apt-get here." "Install what your system calls: ${missing[*]}"
  stage "Reading the package lists (apt-get update)" "${as[@]}" apt-get update -q || { tail -n 5 "$log" >&2; die "apt-get update failed; the lines above say why."; }
  stage "Installing ${missing[*]} (apt-get install)" "${as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" ||
    { tail -n 5 "$log" >&2; die "apt-get install ${missing[*]} failed; the lines above say why."; }
}

# A stamp holds while its lock, the project's own file and the place are the same and the interpreter runs: an environment cannot be moved.
key() { { pwd; cat "$1" pyproject.toml; } | cksum; }
here() { grep -qsF "$PWD/.venv/bin/python" .venv/bin/pip && .venv/bin/python -m pip -V >/dev/null 2>&1; }
ready() { [ -x .venv/bin/tidegate ] && [ "$(cat ".venv/.$want" 2>/dev/null)" = "$(key "$lock")" ] && .venv/bin/python -c '' 2>/dev/null; }

[ "$want" = run ] || [ "$want" = test ] || die "usage: scripts/setup.sh [test]"
log=$(mktemp) || die "No temporary file can be made." "Is the disk full? TMPDIR is ${TMPDIR:-/tmp}."
trap 'rm -f "$log"' EXIT
[ "$want" = run ] || install_packages
ready && exit 0

python=$(find_python)
[ ! -L .venv ] || die "$PWD/.venv is a link; what it leads to is left alone." "Remove the link, and run the same command again."
[ ! -e .venv ] || [ -e .venv/pyvenv.cfg ] || [ -z "$(ls -A .venv)" ] || die "$PWD/.venv is no Python environment; it is left alone." "Move it away, and run the same command again."
mkdir -p .venv 2>/dev/null && [ -w .venv ] || die "No permission to write $PWD/.venv." "Is this checkout yours? Clone it into a folder of your own."
here || stage "Making .venv with $("$python" -V)" "$python" -m venv --clear .venv || pip_failed
rm -f ".venv/.$want"
pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input)
count=$(grep -c '^[a-z0-9].*==' "$lock")
say "Everything goes into $PWD/.venv, from $lock (versions and hashes); nothing outside it changes."
stage "Fetching and installing $count packages" "${pip[@]}" install --no-deps --require-hashes -r "$lock" || pip_failed
stage "Installing tidegate itself" "${pip[@]}" install --no-deps --no-build-isolation -e . || pip_failed
key requirements.lock >.venv/.run  # the test lock holds the running one
[ "$want" = run ] || key "$lock" >.venv/.test
