"""Sizes of the packages that pip downloads and installs for cuflash and its peers, written by `sizes.py FILE` as JSON.

For each stack it counts bytes of all packages, and of packages that PyTorch does not install. It needs a package index.
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from cuflash.tools.bench.table import file_of

ROOT = Path(__file__).resolve().parents[1]
PYTORCH = "torch"
# FlashAttention-4 needs a version: all of its releases are betas, which pip skips otherwise.
STACKS = {
    "cuflash[cuda13]": f"{ROOT}[cuda13]",
    "cuflash[cuda12]": f"{ROOT}[cuda12]",
    PYTORCH: PYTORCH,
    "flash-attn-4": "flash-attn-4>=4.0.0b1",
}


def pip(*arguments: str) -> str:
    """Runs a pip command and returns its output."""
    return subprocess.run([sys.executable, "-m", "pip", *arguments], stdout=-1, text=True, check=True).stdout


def packages_of(requirement: str) -> list[tuple[str, str]]:
    """Returns names and versions of the packages that pip would install."""
    report = pip("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", requirement)
    return [(entry["metadata"]["name"], entry["metadata"]["version"]) for entry in json.loads(report)["install"]]


def sizes_of(name: str, version: str) -> tuple[int, int]:
    """Returns the bytes of a package's wheel and of its content. The wheel of cuflash is built here."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "cuflash":
            pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT))
        else:
            pip("download", "--quiet", "--no-deps", "--dest", folder, f"{name}=={version}")
        (wheel,) = Path(folder).iterdir()
        with zipfile.ZipFile(wheel) as content:
            return wheel.stat().st_size, sum(each.file_size for each in content.infolist())


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: sizes.py FILE")
    packages = {stack: packages_of(requirement) for stack, requirement in STACKS.items()}
    of_torch = {name for name, _ in packages[PYTORCH]}
    sizes = {each: sizes_of(*each) for each in dict.fromkeys(x for entries in packages.values() for x in entries)}
    rows = []
    for stack, entries in packages.items():
        beside = sum(sizes[each][0] for each in entries if each[0] not in of_torch)
        row = {"stack": stack, "bytes": sum(sizes[each][0] for each in entries), "bytes_beside_torch": beside}
        row["bytes_on_disk"] = sum(sizes[each][1] for each in entries)
        rows.append(row | {"packages": {f"{name} {version}": sizes[name, version][0] for name, version in entries}})
    command = shlex.join(["python", ".ci/sizes.py", sys.argv[1]])
    where = {"platform": f"{platform.system()} {platform.machine()}", "Python": platform.python_version()}
    text = file_of({"command": command, "machine": where, "rows": rows})
    Path(sys.argv[1]).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
