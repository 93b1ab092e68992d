"""What the site takes from npm: CPython for browsers, and formulas as HTML."""

import hashlib
import subprocess
import tarfile
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """An npm package of one version. `needed` are the files that the site serves."""

    name: str
    version: str
    sha256: str
    needed: tuple[str, ...]

    def folder(self, root: Path) -> Path:
        """Return its unpacked folder, which the first call downloads into work/.

        Raises RuntimeError if npm is missing or fails, and for a package with other contents.
        """
        folder = root / "work" / f"{self.name}-{self.version}"
        if not all(any((folder / "package").glob(name)) for name in self.needed):
            folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(self._downloaded(folder)) as archive:
                archive.extractall(folder, filter="data")
        return folder / "package"

    def files(self, root: Path) -> list[Path]:
        """Return the needed files."""
        folder = self.folder(root)
        return [path for name in self.needed for path in sorted(folder.glob(name))]

    def _downloaded(self, folder: Path) -> Path:
        command = ["npm", "pack", f"{self.name}@{self.version}", "--silent"]
        try:
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"{' '.join(command)} failed ({error}); install Node.js") from error
        package = folder / f"{self.name}-{self.version}.tgz"
        got = hashlib.sha256(package.read_bytes()).hexdigest()
        if got != self.sha256:
            raise RuntimeError(
                f"got {package} with SHA-256 {got}, wanted {self.sha256}; see its release"
            )
        return package


# Licence: MPL 2.0.
# Not Brython 3.15, whose `io.open` takes no pathlib.Path, so gpus.csv cannot be read. Pyodide runs
# memlab's files unmodified, in 13 s where Brython's imports took 35 s.
PYODIDE = Package(
    "pyodide",
    "314.0.7",
    "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0",
    (
        *("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip"),
        *("pyodide-lock.json", "package.json"),
    ),
)
# Licence: MIT.
KATEX = Package(
    "katex",
    "0.19.1",
    "24da5a599eb2fcede2e270b99a6ff48bca816beecc95feeb84e8cccbd1bb34fd",
    ("dist/katex.min.css", "dist/fonts/*.woff2"),
)
