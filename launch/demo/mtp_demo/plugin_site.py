"""Make the plugin importable, and its entry point visible, where nothing can be installed.

``python plugin_site.py FOLDER`` fills FOLDER with links to the checkout's packages and a ``.dist-info`` with the entry
point; put FOLDER on PYTHONPATH. Standard library only.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def make(folder: Path, root: Path = ROOT) -> None:
    """Fill ``folder``; a second call changes nothing."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    name, version = project["project"]["name"], project["project"]["version"]
    directories = project["tool"]["setuptools"].get("package-dir", {})
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    groups = project["project"]["entry-points"]
    lines: list[str] = []
    for group, items in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in items.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    for package in {entry.split(".")[0] for entry in project["tool"]["setuptools"]["packages"]}:
        link = folder / package
        if not link.is_symlink():
            link.symlink_to(root / directories.get(package, package), target_is_directory=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
