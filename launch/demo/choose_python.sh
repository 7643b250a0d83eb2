# Sourced after setup.sh. `choose_python OPTIONS ARGUMENT...` takes --version and --python out of the arguments, has OPTIONS, a
# file that needs the standard library only, check the others before nine gigabytes are installed, and sets PYTHON and
# `arguments`. Ends the script where a flag is wrong, or after --help.
choose_python() {
    local options="$1" version="${SGLANG_VERSIONS[0]}" checker argument
    shift
    PYTHON="${DEMO_PYTHON:-}"
    arguments=()
    while [ $# -gt 0 ]; do
        case "$1" in
            --version) [ $# -gt 1 ] || misuse "--version needs a value: ${SGLANG_VERSIONS[*]}"; version="$2"; shift 2 ;;
            --version=*) version="${1#*=}"; shift ;;
            --python) [ $# -gt 1 ] || misuse "--python needs the path of an interpreter"; PYTHON="$2"; shift 2 ;;
            --python=*) PYTHON="${1#*=}"; shift ;;
            *) arguments+=("$1"); shift ;;
        esac
    done
    checker="${PYTHON:-$(find_python)}" || die "Python 3.11, 3.12 or 3.13 is needed and none is on PATH."
    command -v "$checker" >/dev/null || misuse "--python: no interpreter at $checker"
    PYTHONDONTWRITEBYTECODE=1 "$checker" "$options" ${arguments[@]+"${arguments[@]}"} || exit $?
    for argument in ${arguments[@]+"${arguments[@]}"}; do
        case "$argument" in -h | --help) exit 0 ;; esac
    done
    if [ -n "$PYTHON" ]; then
        . "$ROOT/launch/demo/use_python.sh"
    else
        setup_environment "$version"
    fi
}
