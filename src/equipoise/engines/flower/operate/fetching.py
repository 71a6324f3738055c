"""After a run: the operator publishes finished models, and each node gets them, tries them on its own data and keeps the best.

A published folder holds one model file per run and manifest.json with their SHA-256. It may be copied, or be served by any web
server. A node asks by GET without a body: nobody learns what it found, nor which model it keeps.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from flwr.app import Context, RecordDict

from equipoise.core.files import make_folder, write_atomically
from equipoise.core.plain_safetensors import read_plainly
from equipoise.core.plain_text import made_of, parse_json
from equipoise.engines.flower.apps.model_source import make_model
from equipoise.engines.flower.apps.node_app import NodeApp
from equipoise.engines.flower.apps.owned_app import load_installed
from equipoise.engines.flower.operate.kits import Kit
from equipoise.errors import ConfigError, EquipoiseError, FileGuard
from equipoise.experiment.run_files import RunFolder, file_checksum, refuse_damaged_files
from equipoise.report.notices import FEW_EXAMPLES as FEW
from equipoise.runs.trivial_answer import trivial_answer

MANIFEST = "manifest.json"
MODEL, CHOICE = "model.safetensors", "choice.json"  # what `fetch` leaves on a site
LARGEST_MANIFEST, LARGEST_MODEL = 2**20, 4 * 2**30


def publish(runs: Sequence[Path], out: Path) -> list[str]:
    """Write the models of finished runs into a folder, with their checksums; the names of the models."""
    entries: list[dict[str, Any]] = []
    make_folder(out)
    for path in runs:
        folder = RunFolder(path)
        if not folder.finished:
            raise ConfigError(f"{path} holds no finished run.")
        if not anyone_trained(folder):
            reason = f"In no round of {path} did a client train: its model is the one that the run began with."
            raise ConfigError(f"{reason} {folder.rounds.name} says why each client was left out.")
        refuse_damaged_files(folder, folder.last_event().get("sha256", {}))
        name = path.resolve().name
        if any(entry["name"] == name for entry in entries):
            raise ConfigError(f"Two runs are called {name!r}. Give one of the folders another name.")
        file = write_atomically(out / f"{name}.safetensors", folder.model.read_bytes())
        entries.append({"name": name, "file": file.name, "bytes": file.stat().st_size, "sha256": file_checksum(file)})
    write_atomically(out / MANIFEST, (json.dumps({"models": entries}, indent=1) + "\n").encode())
    return [str(entry["name"]) for entry in entries]


def anyone_trained(folder: RunFolder) -> bool:
    """Whether there is a round of a finished run in which clients trained, by its log."""
    with FileGuard(folder.rounds, ConfigError), folder.rounds.open(encoding="utf-8") as lines:
        return any((parse_json(line).get("trained") or 0) > 0 for line in lines)


def reader(source: str, *, token: str | None = None, authority: Path | None = None) -> Callable[[str, int], bytes]:
    """What reads a file of a published folder: from a folder of this machine, or from a web server."""
    if not re.match(r"https?://", source):
        folder = Path(source)

        def read_local(name: str, largest: int) -> bytes:
            try:
                content = (folder / name).read_bytes()
            except OSError as failure:
                raise ConfigError(f"{folder / name} cannot be read: {failure.strerror}.") from failure
            if len(content) > largest:
                raise ConfigError(f"{name} is larger than {largest} bytes.")
            return content

        return read_local
    from equipoise.serve.choose import FamilyClient

    client = FamilyClient(source.rstrip("/"), token, authority)
    return lambda name, largest: client.get(f"/{quote(name)}", largest)


def read_entries(content: bytes) -> list[dict[str, Any]]:
    """The models that a manifest names, checked."""
    with FileGuard(MANIFEST, ConfigError, "is no list of published models"):
        entries: list[dict[str, Any]] = list(parse_json(content, finite=True)["models"])
        for entry in entries:
            made_of(str, entry["name"])
            plain = re.fullmatch(r"[^/\\]{1,200}\.safetensors", entry["file"]) and entry["file"] == Path(entry["file"]).name
            if not plain or not re.fullmatch("[0-9a-f]{64}", entry["sha256"]) or not 0 < entry["bytes"] <= LARGEST_MODEL:
                raise ValueError(f"it describes {str(entry)[:200]}")
        if not entries:
            raise ValueError("it names no model")
    return entries


def fetch(
    source: str, kit: Kit, out: Path, *, token: str | None = None, authority: Path | None = None, overwrite: bool = False
) -> list[str]:
    """Get the models, try each on this node's data, and keep the best in a folder; what was found, line by line.

    Validation examples decide where there are any, else the examples to train on: those to test on are left for a fair figure.
    What an earlier `fetch` has put into the folder is replaced; files of others are, too, if `overwrite` says so.
    """
    before = find_fetched(out, kit.client, overwrite=overwrite)
    read = reader(source, token=token, authority=authority or kit.authority)
    files = {}
    for entry in read_entries(read(MANIFEST, LARGEST_MANIFEST)):
        content = read(entry["file"], int(entry["bytes"]))
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ConfigError(f"{entry['file']} arrived damaged: its SHA-256 is not that of the manifest. Try again.")
        files[str(entry["name"])] = content
    app = load_installed(kit.app)
    if not isinstance(app, NodeApp):
        raise ConfigError(f"{kit.app} is no app of Equipoise: the models cannot be tried on its data.")
    scores = {name: score(app, kit, content, name) for name, content in files.items()}
    judged = next(split for split in ("validation", "train", "test") if split in next(iter(scores.values())))
    best = min(scores, key=lambda name: scores[name][judged][0])
    make_folder(out)
    now = hashlib.sha256(files[best]).hexdigest()
    choice = {
        "client": kit.client,
        "model": best,
        "judged_by": judged,
        "sha256": now,
        "source": source,
        "scores": scores,
        "replaces": before,
    }
    # The choice first: if the process ends between the two, it still tells both models from files of others.
    write_atomically(out / CHOICE, (json.dumps(choice, indent=1) + "\n").encode())
    write_atomically(out / MODEL, files[best])
    lines = [
        f"{name}: " + ", ".join(f"{split} loss {loss:.4f}, error {error:.4f}" for split, (loss, error) in found.items())
        for name, found in scores.items()
    ]
    chosen = f"{best} serves this node's data best (by its {judged} loss), and is" if len(scores) > 1 else f"{best} is"
    trivial = trivial_errors(app, kit)
    lines += [f"{name} for all: " + ", ".join(f"{split} error {error:.4f}" for split, error in errors.items())
              for name, errors in trivial.items()]  # fmt: skip
    replaced = "" if before is None else " It was there already." if before == now else " It replaces the one before."
    lines += [f"{chosen} in {out}.{replaced} Nothing was sent."]
    return lines + warn_of_trivial(best, scores[best], trivial, count_examples(app, kit))


def find_fetched(out: Path, client: str, *, overwrite: bool) -> str | None:
    """The SHA-256 of the model that an earlier `fetch` has put into a folder; None without one.

    A folder in which files of others would be lost, or the model of another site than `client`, is refused, unless `overwrite`.
    """
    model, choice, whose = out / MODEL, out / CHOICE, client
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out must be a folder, but {out} is a file. Name another: --out DIR.")
    try:
        about = parse_json(choice)
        known = {about["sha256"], about.get("replaces")}
        whose = about.get("client", client)
    except FileNotFoundError:
        known = set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = None
    if whose != client and not overwrite:
        raise ConfigError(
            f"{out} has the model that was chosen for {whose}, and this kit is that of {client}. Name another folder "
            "(--out DIR), or replace it (--overwrite)."
        )
    there = file_checksum(model) if model.is_file() else None
    foreign = MODEL if there is not None and there not in (known or ()) else CHOICE if known is None else None
    if foreign is not None and not overwrite:
        raise ConfigError(
            f"{out / foreign} was not written by `equipoise flower fetch`, and would be lost. Name another folder (--out DIR), "
            "or replace it (--overwrite)."
        )
    return there


def trivial_errors(app: NodeApp, kit: Kit) -> dict[str, dict[str, float]]:
    """The error of the trivial answer on each split of this node's data, under its name; nothing where it is not known."""
    context = Context(0, 0, dict(kit.node_config), RecordDict(), {})
    node = app.setup.data(context)
    started = app.setup.start(context, 0, node.data.classes)
    found = trivial_answer(started.task, make_model(app.setup.model, 0).eval(), node.data) if node.trains else None
    if found is None:
        return {}
    return {found.name: dict(zip(node.data.splits, found.errors.tolist(), strict=True))}


def count_examples(app: NodeApp, kit: Kit) -> dict[str, int]:
    """The number of this node's examples of each split."""
    return dict(app.setup.data(Context(0, 0, dict(kit.node_config), RecordDict(), {})).sizes)


def warn_of_trivial(
    name: str, scores: dict[str, tuple[float, float]], trivial: dict[str, dict[str, float]], sizes: Mapping[str, int]
) -> list[str]:
    """A warning for each split of this node's data on which a model is no better than one answer for all examples.

    Of few examples the difference may be chance, and the warning says so.
    """

    def verdict(split: str) -> str:
        count = sizes.get(split, FEW)
        if count >= FEW:
            return "The model is of no use there: find out why before anyone relies on it."
        return f"These are only {count} examples, so that this may be chance: look at more before anyone relies on the model."

    return [
        f"WARNING: on this node's {split} examples {name} has an error of {scores[split][1]:.4g}. The {answer} for all "
        f"examples has {errors[split]:.4g}. {verdict(split)}"
        for answer, errors in trivial.items()
        for split in ("test", "validation", "train")
        if split in scores and split in errors and scores[split][1] >= errors[split]
    ]


def score(app: NodeApp, kit: Kit, content: bytes, name: str) -> dict[str, tuple[float, float]]:
    """Mean loss and error of a model on each split of this node's data."""
    context = Context(0, 0, dict(kit.node_config), RecordDict(), {})
    node = app.setup.data(context)
    started = app.setup.start(context, 0, node.data.classes)
    module = copy.deepcopy(make_model(app.setup.model, 0))
    with FileGuard(name, ConfigError, "is not the model of this app"):
        module.load_state_dict(read_plainly(content)[0])
    task, alone = started.task, torch.zeros(1, dtype=torch.int64)
    params = (
        torch.cat([task.layout.read(module), task.carried.read(module, task.layout.dtype)])
        if task.carried.names
        else task.layout.read(module)
    )
    found = {}
    for split in node.sizes:
        loss, error = started.engine.evaluate_own(params.unsqueeze(0), started.data.splits[split], alone)
        if not bool(torch.isfinite(loss).all()):
            raise EquipoiseError(f"{name} has a loss on this node's data that is not finite.")
        found[split] = (float(loss[0]), float(error[0]))
    return found
