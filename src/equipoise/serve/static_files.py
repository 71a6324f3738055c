"""What pages load: our style sheet and scripts, and onnxruntime-web, all compressed. Addresses hold a hash of the content."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from equipoise.report.html import asset
from equipoise.report.knob import PAGE_SCRIPTS
from equipoise.report.plot import COLOURS, DARK_COLOURS

FOLDER = Path(__file__).with_name("static")
OWN = ("list.js", "watch.js", "choose.js", "own_data.js", "study.js")
RUNTIME = {  # onnxruntime-web 1.30.0, single-threaded
    "ort.wasm.min.mjs": "text/javascript",
    "ort-wasm-simd-threaded.mjs": "text/javascript",
    "ort-wasm-simd-threaded.wasm": "application/wasm",
}


@dataclass(frozen=True)
class StaticFile:
    """A file as it is sent: compressed by gzip, with its type and the hash in its address."""

    name: str
    kind: str
    packed: bytes
    digest: str

    @property
    def address(self) -> str:
        """Where pages find it; another content has another address."""
        return f"/static/{self.digest}/{self.name}"

    @classmethod
    def of(cls, name: str, kind: str, content: bytes) -> StaticFile:
        """A file of our own."""
        return cls(name, kind, gzip.compress(content, 9, mtime=0), hashlib.sha256(content).hexdigest()[:16])


@cache
def static_files() -> dict[str, StaticFile]:
    """All files by name."""
    found = [StaticFile.of("style.css", "text/css", style().encode())]
    found += [StaticFile.of(name, "text/javascript", asset(name).encode()) for name in PAGE_SCRIPTS]
    found += [StaticFile.of(name, "text/javascript", (FOLDER / name).read_bytes()) for name in OWN]
    for name, kind in RUNTIME.items():
        packed = (FOLDER / "onnxruntime" / f"{name}.gz").read_bytes()
        found.append(StaticFile(name, kind, packed, hashlib.sha256(packed).hexdigest()[:16]))
    return {file.name: file for file in found}


def style() -> str:
    """The style sheet: the report's, the knob's, and that of the server's own pages."""
    light, dark = ("".join(f"--method-{k}:{shade};" for k, shade in enumerate(shades)) for shades in (COLOURS, DARK_COLOURS))
    palette = f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark) {{:root{{{dark}}}}}\n"
    own = (FOLDER / "serve.css").read_text(encoding="utf-8")
    return f"{asset('page.css')}{palette}{asset('knob.css')}{own}"


def address(name: str) -> str:
    """Where pages find a file."""
    return static_files()[name].address
