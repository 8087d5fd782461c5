# shellcheck shell=bash
# The environment that scripts/test and scripts/quickstart share. Source it in bash (3.2 or newer), never run it:
#
#     root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
#     . "$root/scripts/environment.sh"
#     mlxdist_environment dev         # or: mlxdist_environment, mlxdist_environment dev,data
#     "$PYTHON" -m mlxdist --help     # or plain `mlxdist`: the environment's bin comes first in PATH
#
# mlxdist_environment [extras]   makes .venv in the project's folder, installs mlxdist into it (editable, with the given
#                                extras), looks for OpenBLAS on Linux (and installs it as root; for dev also
#                                the tools of the tests over ssh and of Bonjour, and a browser), and sets
#                                  PYTHON               the environment's interpreter, an absolute path
#                                  PATH                 with the environment's bin in front
#                                  MLX_DISABLE_COMPILE  1 on a Linux without g++ (mlx compiles its kernels with it)
#                                On failure, returns 1 after one sentence that says what to do. Quick when nothing is
#                                left to do.
# mlxdist_stage SENTENCE COMMAND...
#                                runs a long silent command and prints the sentence, a dot every 2 seconds, and the
#                                seconds it took; prints the end of the command's output when it fails.
# mlxdist_say SENTENCE           prints one line on stderr, like the stages.
# mlxdist_peft                   installs peft and torch into .venv/peft, for one test; returns 1 where that is not possible.
#
# MLXDIST_PYTHON names the interpreter to make the environment from; the default is the first suitable one found.

mlxdist_say() {
    printf '%s\n' "$*" >&2
}

mlxdist_stage() {
    local sentence="$1" log status started dots
    shift
    log="$(mktemp "${TMPDIR:-/tmp}/mlxdist.XXXXXX")" || return 1
    started=$SECONDS
    printf '%s ' "$sentence" >&2
    # The dots run in the background and the command in the foreground, so that Ctrl-C reaches the command.
    (
        while sleep 2 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do printf '.' >&2; done
        rm -f "$log"
    ) &
    dots=$!
    status=0
    "$@" >"$log" 2>&1 </dev/null || status=$?
    kill "$dots" 2>/dev/null || true
    wait "$dots" 2>/dev/null || true
    if [ "$status" -eq 0 ]; then
        mlxdist_say " $((SECONDS - started)) s"
    else
        mlxdist_say " failed:"
        tail -n 20 "$log" >&2
    fi
    rm -f "$log"
    return "$status"
}

# The folder of the project: the one above this file's.
_mlxdist_root() {
    (cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
}

# True for an interpreter that mlx has packages for: Python 3.11 to 3.14, native on a Mac.
_mlxdist_fit() {
    "$1" -c '
import platform, sys
native = sys.platform != "darwin" or platform.machine() == "arm64"
sys.exit(0 if native and (3, 11) <= sys.version_info[:2] <= (3, 14) else 1)' >/dev/null 2>&1 </dev/null
}

# True for the python3 of a Mac without developer tools: it only opens a window that offers to install them.
_mlxdist_is_stub() {
    [ "$(uname -s)" = Darwin ] && [ "$(command -v "$1")" = /usr/bin/python3 ] && ! xcode-select -p >/dev/null 2>&1
}

# Prints the absolute path of a suitable interpreter.
_mlxdist_find_python() {
    local candidate
    if [ -n "${MLXDIST_PYTHON:-}" ]; then
        if _mlxdist_fit "$MLXDIST_PYTHON"; then
            command -v "$MLXDIST_PYTHON"
            return 0
        fi
        mlxdist_say "MLXDIST_PYTHON=$MLXDIST_PYTHON is not a Python 3.11 to 3.14 (on a Mac: for arm64); name one that is, or unset it."
        return 1
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.14 python \
        /opt/homebrew/bin/python3 /opt/homebrew/bin/python3.13 /opt/homebrew/bin/python3.12 /opt/homebrew/bin/python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 && ! _mlxdist_is_stub "$candidate" && _mlxdist_fit "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    if [ "$(uname -s)" = Darwin ]; then
        mlxdist_say "mlxdist needs a Python 3.11 to 3.14 for Apple Silicon and found none: brew install python@3.12, then run this again."
    else
        mlxdist_say "mlxdist needs Python 3.11 to 3.14 and found none: apt install python3 python3-venv (Debian 12 or newer), then run this again."
    fi
    return 1
}

# True when $1/.venv works and was made for this folder: a moved or copied environment still uses the old folder.
_mlxdist_have_venv() {
    _mlxdist_fit "$1/.venv/bin/python" && "$1/.venv/bin/python" -m pip --version >/dev/null 2>&1 &&
        { [ ! -f "$1/.venv/made-in" ] || [ "$(cat "$1/.venv/made-in")" = "$1" ]; }
}

# Makes $1/.venv a virtual environment with pip in it.
_mlxdist_make_venv() {
    local python tool status venv="$1/.venv"
    python="$(_mlxdist_find_python)" || return 1
    if [ -e "$venv" ] && [ ! -f "$venv/made-in" ]; then
        mlxdist_say "$venv is not an environment of Python 3.11 to 3.14 with pip, and was not made by this script: remove it, then run this again."
        return 1
    fi
    rm -rf "$venv" && mkdir "$venv" && printf '%s\n' "$1" >"$venv/made-in" || return 1
    if "$python" -c 'import venv; from ensurepip import version' >/dev/null 2>&1; then
        mlxdist_stage "Making the environment in .venv" "$python" -m venv "$venv"
    elif command -v uv >/dev/null 2>&1; then
        mlxdist_stage "Making the environment in .venv with uv" \
            uv venv --quiet --allow-existing --seed --python "$python" "$venv"
    elif "$python" -m pip --version >/dev/null 2>&1; then
        # Debian's Python has no ensurepip; virtualenv has its own pip. --target does not touch the system's packages.
        tool="$(mktemp -d "${TMPDIR:-/tmp}/mlxdist.XXXXXX")" || return 1
        status=0
        mlxdist_stage "Fetching virtualenv" "$python" -m pip install --quiet --target "$tool" virtualenv &&
            mlxdist_stage "Making the environment in .venv with virtualenv" \
                env PYTHONPATH="$tool" "$python" -m virtualenv "$venv" || status=$?
        rm -rf "$tool"
        return "$status"
    else
        mlxdist_say "$python cannot make an environment, because it has neither ensurepip nor pip: apt install python3-venv, then run this again."
        return 1
    fi
}

# Prints what an installation depends on: the project file, the interpreter, the folder (environments cannot be moved).
_mlxdist_stamp() {
    printf '%s\n' "$(cksum <"$1/pyproject.toml")" "$("$1/.venv/bin/python" -c 'import sys; print(sys.version)')" "$1"
}

# Installs Debian packages: SENTENCE PACKAGE... Returns 1 without root or apt.
_mlxdist_install() {
    local sentence="$1"
    shift
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    mlxdist_stage "$sentence ($*)" sh -c '
        export DEBIAN_FRONTEND=noninteractive
        apt-get install -y --no-install-recommends "$@" ||
            { apt-get update && apt-get install -y --no-install-recommends "$@"; }' sh "$@"
}

# On Linux mlx computes with the BLAS that is loaded before it; mlxdist loads OpenBLAS when the machine has it.
_mlxdist_openblas() {
    "$PYTHON" -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' >/dev/null 2>&1 && return 0
    _mlxdist_install "Installing OpenBLAS" libopenblas0-pthread ||
        mlxdist_say "OpenBLAS is not installed, so training on this machine's CPU is several times slower: apt install libopenblas0-pthread"
}

# The tests over ssh run real servers and login shells in network namespaces (scripts/cluster_bed.py), those of joining
# run avahi there. Both need root.
_mlxdist_bed() {
    local tool missing=""
    for tool in ip tc sshd ssh rsync fish csh tcsh zsh avahi-daemon avahi-browse dbus-daemon; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null 2>&1 || missing="$missing $tool"
    done
    [ -z "$missing" ] ||
        _mlxdist_install "Installing ssh, shells and avahi for tests" iproute2 openssh-server openssh-client rsync \
            fish csh tcsh zsh avahi-daemon avahi-utils dbus ||
        mlxdist_say "Tests over ssh and of Bonjour are skipped; they need root, and these are missing:$missing"
}

# The page of mlxdist view is tested in a real browser (some 110 MB, half a minute).
_mlxdist_browser() {
    command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 ||
        _mlxdist_install "Installing a browser for tests" chromium ||
        mlxdist_say "The tests of the page in a browser are skipped: apt install chromium"
}

# Installs Hugging Face's peft with torch for the CPU into $PEFT, a folder that only its own test has in its path:
# transformers imports torch wherever it finds it, so every other process would start later. Torch's build without CUDA
# (192 MB in place of 2.7 GB) is on PyPI for Macs, and for x86 Linux on the index of PyTorch. Returns 1 without it.
mlxdist_peft() {
    local torch="torch==2.13.0"
    [ "$(uname -sm)" != "Linux x86_64" ] || torch="torch==2.13.0+cpu"
    PEFT="$(_mlxdist_root)/.venv/peft"
    export PEFT
    [ -f "$PEFT/complete" ] && return 0
    rm -rf "$PEFT"
    mlxdist_stage "Installing torch for the test with peft" "$PYTHON" -m pip install --disable-pip-version-check \
        --no-input --no-deps --target "$PEFT" --retries 1 --timeout 30 \
        --extra-index-url https://download.pytorch.org/whl/cpu "$torch" &&
        mlxdist_stage "Installing peft" "$PYTHON" -m pip install --disable-pip-version-check --no-input --no-deps \
            --target "$PEFT" "peft>=0.18" accelerate sympy mpmath networkx &&
        touch "$PEFT/complete"
}

mlxdist_environment() {
    local extras="${1:-}" root venv stamp
    root="$(_mlxdist_root)" || return 1
    venv="$root/.venv"
    stamp="$venv/installed-${extras:-plain}"
    _mlxdist_have_venv "$root" || _mlxdist_make_venv "$root" || return 1
    PYTHON="$venv/bin/python"
    export PYTHON
    export PATH="$venv/bin:$PATH"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$(_mlxdist_stamp "$root")" ]; then
        mlxdist_stage "Installing mlxdist and what it needs" \
            "$PYTHON" -m pip install --disable-pip-version-check --no-input --editable "$root${extras:+[$extras]}" || {
            mlxdist_say "The installation stopped; see the lines above (no network, or no space?), then run this again."
            return 1
        }
        _mlxdist_stamp "$root" >"$stamp"
    fi
    if [ "$(uname -s)" = Linux ]; then
        _mlxdist_openblas
        case ",$extras," in *,dev,*) _mlxdist_bed && _mlxdist_browser ;; esac
        if ! command -v g++ >/dev/null 2>&1; then
            export MLX_DISABLE_COMPILE=1
        fi
    fi
}
