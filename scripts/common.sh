# Sourced by the scripts beside it: what they say, and where things lie. Everything works from any directory.
# shellcheck shell=bash
# shellcheck disable=SC2034  # the variables are for the scripts that source this

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
default_torch=2.15.0

say() { printf 'oomdiag: %s\n' "$*" >&2; }

# fail MESSAGE [HINT]
fail() {
  say "error: $1"
  if [[ $# -gt 1 ]]; then printf 'hint: %s\n' "$2" >&2; fi
  exit 1
}

# usage: prints the comment at the head of the calling script and ends it.
usage() {
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
  exit "${1:-0}"
}

unknown_option() {
  say "error: unknown option '$1'"
  usage 2 >&2
}

# The torch versions that scripts/requirements pins.
known_torch_versions() {
  local file name
  for file in "$root"/scripts/requirements/*.txt; do
    name=$(basename "$file" .txt)
    [[ $name == *-test-programs ]] || printf '%s ' "$name"
  done
}

check_torch_version() {
  [[ -n $1 && -e $root/scripts/requirements/$1.txt ]] ||
    fail "torch '$1' is not a version that oomdiag pins" "valid: $(known_torch_versions)"
  if [[ $1 == "$default_torch" ]]; then remember_torch; fi
}

# build/ goes on with the torch it was made from: forgotten in the next shell, OOMDIAG_TORCH would mean a download of 3 GB and
# a build over this one. Set and empty it means the private torch again.
remember_torch() {
  local lines=()
  [[ -z ${OOMDIAG_TORCH+set} && -e $root/build/.origin ]] || return 0
  mapfile -t lines <"$root/build/.origin"
  if [[ ${lines[0]:-} == "$root" && ${lines[1]:-} != "$root"/.venv* && -e ${lines[1]:-}/version.py ]]; then
    export OOMDIAG_TORCH=${lines[1]}
  fi
}

# The default version has the plain names, the others carry theirs.
suffix_of() { [[ $1 == "$default_torch" ]] || printf -- '-%s' "$1"; }
venv_of() { printf '%s/.venv%s' "$root" "$(suffix_of "$1")"; }

# The site-packages/torch to build against: the user's own (OOMDIAG_TORCH), else the private one of this version.
torch_of() {
  if [[ -n ${OOMDIAG_TORCH:-} ]]; then
    printf '%s' "$OOMDIAG_TORCH"
  else
    local found
    found=("$(venv_of "$1")"/lib/python3*/site-packages/torch)
    printf '%s' "${found[0]}"
  fi
}

# tools_venv NAME PACKAGE...: a virtual environment of its own for what a script runs, .venv-NAME, with just these; prints its folder
tools_venv() {
  local venv=$root/.venv-$1
  shift
  if ! cmp -s <(echo "$@") "$venv/oomdiag-tools"; then
    say "installing $*"
    python3 -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2
    echo "$@" >"$venv/oomdiag-tools"
  fi
  printf '%s' "$venv"
}

check_sanitizer() {
  [[ $1 == "" || $1 == address || $1 == thread ]] || fail "unknown sanitizer '$1'" "valid: address (with undefined), thread"
}

# sanitizers_of address|thread|"": what goes to -fsanitize=
sanitizers_of() { [[ $1 == address ]] && printf 'address,undefined' || printf '%s' "$1"; }

# build_of TORCH_VERSION SANITIZER: its build folder
build_of() {
  local short=
  case $2 in
    address) short=-asan ;;
    thread) short=-tsan ;;
  esac
  printf '%s/build%s%s' "$root" "$(suffix_of "$1")" "$short"
}

# What a finished build is stamped with: this checkout, and the user's own torch if any. scripts/oomdiag compares it.
stamp() { printf '%s\n%s\n' "$root" "${OOMDIAG_TORCH:-}"; }
