"""What the outputs of the site depend on besides their own source: the library. A change of it empties the caches."""

import hashlib
import os
import shutil
from pathlib import Path


def library_hash(docs: Path) -> str:
    """A hash of every Python and TOML file of the library, and of the versions that are installed with it."""
    digest = hashlib.sha256((docs.parent / "constraints.txt").read_bytes())
    for path in sorted((docs.parent / "src").rglob("*")):
        if path.suffix in (".py", ".toml"):
            digest.update(str(path.relative_to(docs.parent)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def refresh(docs: Path) -> None:
    """Forget executed notebooks and examples if the library is not the one that executed them.

    `EQUIPOISE_DOCS_KEEP=1` keeps them: for those who write pages while the library changes.
    """
    cache = docs / "_cache"
    stamp, now = cache / "library.sha256", library_hash(docs)
    if (stamp.exists() and stamp.read_text() == now) or os.environ.get("EQUIPOISE_DOCS_KEEP"):
        return
    for folder in (cache, docs / "gallery"):
        shutil.rmtree(folder, ignore_errors=True)
    cache.mkdir()
    stamp.write_text(now)
