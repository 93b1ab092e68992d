"""Pyodide: CPython for browsers, from its npm package (licence: MPL 2.0)."""

import hashlib
import subprocess
import tarfile
from pathlib import Path

VERSION = "314.0.7"
SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
NEEDED = (
    *("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip"),
    *("pyodide-lock.json", "package.json"),
)


def files(root: Path) -> list[Path]:
    """Return the files that a page needs, which the first call downloads into work/.

    Raises RuntimeError if npm is missing or fails, and for a package with other contents.
    """
    folder = root / "work" / f"pyodide-{VERSION}"
    if not all((folder / "package" / name).exists() for name in NEEDED):
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(download(folder)) as archive:
            archive.extractall(folder, filter="data")
    return [folder / "package" / name for name in NEEDED]


def download(folder: Path) -> Path:
    command = ["npm", "pack", f"pyodide@{VERSION}", "--silent"]
    try:
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{' '.join(command)} failed ({error}); install Node.js") from error
    package = folder / f"pyodide-{VERSION}.tgz"
    got = hashlib.sha256(package.read_bytes()).hexdigest()
    if got != SHA256:
        raise RuntimeError(f"got {package} with SHA-256 {got}, wanted {SHA256}; see its release")
    return package
