# Sourced: makes the plugin's entry point visible to $PYTHON, an interpreter that has SGLang, by PYTHONPATH if need be.
command -v "$PYTHON" >/dev/null || misuse "--python: no interpreter at $PYTHON"
"$PYTHON" "$ROOT/launch/demo/mtp_demo/needs.py" || exit 2
if ! "$PYTHON" -c 'import importlib.metadata as m, sys; sys.exit(not m.entry_points(group="sglang.srt.plugins", name="mamba_mtp"))'; then
    site="$ROOT/.cache/plugin-site"
    "$PYTHON" "$ROOT/launch/demo/mtp_demo/plugin_site.py" "$site" || die "Could not fill $site."
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    say "the plugin is taken from this checkout through $site"
fi
