# Sourced by the other launch scripts. `setup_environment VERSION` makes (or reuses) the virtual environment
# .venvs/VERSION in the checkout, with SGLang VERSION, everything pinned in requirements/, and this plugin (editable).
# It sets PYTHON to that environment's interpreter. `setup_wheels [VERSION...]` unpacks SGLang's own wheels, without
# anything they need, under .cache/sglang: all supported versions, or those named.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SGLANG_VERSIONS=(0.5.23 0.5.17)
# A version without an environment of its own can run on a CPU in that of another, which has the transformers it wants:
# its own sources stand first on the path.
declare -A SGLANG_RUNS_IN=([0.5.18]=0.5.17 [0.5.19]=0.5.17 [0.5.20]=0.5.17 [0.5.21]=0.5.17 [0.5.22]=0.5.23)

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf '%s\n' "$*" >&2; exit 1; }
misuse() { printf '%s\n' "$*" >&2; exit 2; } # wrong flags, as argparse ends

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c \
            'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# uv installs 200 packages in about a minute, pip in about ten.
find_uv() {
    if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
        command -v uv
        return
    fi
    if [ ! -x "$ROOT/.venvs/uv/bin/uv" ]; then
        "$1" -m venv "$ROOT/.venvs/uv" >&2 && "$ROOT/.venvs/uv/bin/python" -m pip install --quiet uv >&2 || return 1
    fi
    printf '%s\n' "$ROOT/.venvs/uv/bin/uv"
}

setup_environment() {
    local version="$1" lock="$ROOT/requirements/sglang-$1.txt" env="$ROOT/.venvs/$1" python uv stamp started
    [ -f "$lock" ] || misuse "SGLang version '$version' has no lock file; supported: ${SGLANG_VERSIONS[*]}"
    PYTHON="$env/bin/python"
    stamp="$(cat "$lock" "$ROOT/pyproject.toml" | sha256sum | cut -d' ' -f1) $ROOT"
    if [ -x "$PYTHON" ] && [ "$(cat "$env/.complete" 2>/dev/null)" = "$stamp" ]; then
        say "SGLang $version: reusing .venvs/$version"
        return
    fi
    python="$(find_python)" || die "Python 3.11, 3.12 or 3.13 is needed and none is on PATH."
    uv="$(find_uv "$python")" || die "Could not install uv with '$python -m pip install uv'; see the message above."
    say "SGLang $version: setting up .venvs/$version (about a minute and 9 GB)"
    started=$SECONDS
    [ -x "$PYTHON" ] || "$uv" venv --quiet --python "$python" "$env" || die "Could not make .venvs/$version."
    "$uv" pip sync --python "$PYTHON" --require-hashes "$lock" || die "Installing requirements/sglang-$version.txt failed."
    "$uv" pip install --quiet --python "$PYTHON" --no-deps --editable "$ROOT" || die "Installing the plugin failed."
    printf '%s' "$stamp" >"$env/.complete"
    say "SGLang $version: ready in $((SECONDS - started)) s, $(du -sh "$env" | cut -f1) of disk"
}

setup_wheels() {
    local lock="$ROOT/requirements/sglang-wheels.txt" python uv pin version folder started
    python="$(find_python)" || die "Python 3.11, 3.12 or 3.13 is needed and none is on PATH."
    uv="$(find_uv "$python")" || die "Could not install uv with '$python -m pip install uv'; see the message above."
    while read -r pin; do
        version="${pin%% *}" version="${version#sglang==}" folder="$ROOT/.cache/sglang/$version"
        [ $# -eq 0 ] || [[ " $* " == *" $version "* ]] || continue
        [ "$(cat "$folder/.complete" 2>/dev/null)" != "$pin" ] || continue
        started=$SECONDS
        rm -rf "$folder"
        # one platform for all machines: these wheels are read, and on a Linux CPU also run
        "$uv" pip install --quiet --python "$python" --target "$folder" --no-deps --only-binary :all: --require-hashes \
            --python-version 3.11 --python-platform x86_64-manylinux_2_34 -r - <<<"$pin" ||
            die "Fetching SGLang $version (requirements/sglang-wheels.txt) failed. Can the package registry be reached?"
        printf '%s' "$pin" >"$folder/.complete"
        say "SGLang $version: wheel unpacked under .cache/sglang in $((SECONDS - started)) s, $(du -sh "$folder" | cut -f1) of disk"
    done <"$lock"
}
