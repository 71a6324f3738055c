"""Files of strangers: configurations, run folders, checkpoints, stores, arrays, LEAF's JSON, tables and messages, mutated.

Each ends in an error of our own or in a result, within a bound of time and memory, and writes nothing outside its folder. Many
inputs are read by one forked child; the child says which one it reads before it reads it.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

import equipoise as eq
from campaign_drivers import scenes
from campaign_drivers.findings import Finding, in_child
from campaign_drivers.input_samples import bomb, mutated, samples, wide
from equipoise.data.datasets.data_files import load_json
from equipoise.errors import EquipoiseError
from equipoise.experiment.folder import read_records
from equipoise.experiment.search import read_search
from equipoise.experiment.study import read_study
from equipoise.privacy.ledger_report import entries_below, summarise_ledgers
from equipoise.runs.checkpoint import Checkpoints

TOGETHER = 12  # inputs per child
MEMORY = 3 * 2**30  # bytes that a child may take beyond what it begins with
SECONDS = 60  # of the processor, for one child
CLOCK = 5 * SECONDS  # others may use the processor as well


def read_configuration(place: Path) -> None:
    """Check a configuration and, if it is small, run it."""
    from equipoise.experiment.build import build
    from equipoise.experiment.config import RunConfig

    config = RunConfig.read(place / "run.toml")
    options = config.train
    if options.rounds <= 5 and options.clients_per_round <= 20:
        size = {name: value for name, value in config.data.table().items() if isinstance(value, int | float)}
        if all(abs(value) <= 300 for value in size.values()):
            build(config).train(name="run", progress=False, observers=(), checkpoint=None)


def read_checkpointed(place: Path) -> None:
    """Go on from a checkpoint; a result must be that of the undamaged one."""
    algorithm = eq.Algorithm(personal=eq.personal.Ditto(1.0), server=eq.server_opt.Adam(lr=0.1))
    saving = Checkpoints(place / "run.safetensors", every=1)
    given = {"rounds": 3, "clients_per_round": 4, "progress": False}
    found = eq.train(scenes.softmax(), scenes.plain(), algorithm, checkpoint=saving, **given)
    whole = _whole_run()
    if not torch.equal(found.params, whole):
        raise Finding("a damaged checkpoint ended in another model")


@cache
def _whole_run() -> torch.Tensor:
    algorithm = eq.Algorithm(personal=eq.personal.Ditto(1.0), server=eq.server_opt.Adam(lr=0.1))
    given = {"rounds": 3, "clients_per_round": 4, "progress": False}
    return eq.train(scenes.softmax(), scenes.plain(), algorithm, **given).params


def read_run_folder(place: Path) -> None:
    """What `equipoise report` reads."""
    from equipoise.experiment.folder import finished_runs, read_record

    for folder in finished_runs([place]):
        read_record(folder).summary()


def read_store(place: Path) -> None:
    """Open a store, check it, and read all of it."""
    data = eq.data.open_store(place)
    eq.data.check_store(place)
    for clients in data.splits.values():
        for k in range(min(len(clients), 20)):
            clients.client(at=k)


def read_arrays(place: Path) -> None:
    """Read an archive of arrays."""
    eq.data.npz(place / "data.npz")


def read_leaf(place: Path) -> None:
    """Read LEAF's files."""
    eq.data.leaf(place)


def read_packed_json(place: Path) -> None:
    """Read JSON that is packed by gzip."""
    load_json(place / "data.json.gz")


def read_table(place: Path) -> None:
    """Read a table."""
    eq.data.csv(place / "data.csv", client="client", target="y")


def read_message(place: Path) -> None:
    """Read a message as a node does; what is no message of Flower never reaches it."""
    from flwr.common.serde import recorddict_from_proto
    from flwr.proto.recorddict_pb2 import RecordDict

    from equipoise.engines.flower.transport import messages, part_messages

    try:
        records = recorddict_from_proto(RecordDict.FromString((place / "message").read_bytes()))
    except Exception:
        return
    content = messages.read_message(records)
    for name, kind in (("seed", int), ("since", int), ("client", str)):
        content.value(name, kind)
    content.tensor("params", torch.float64, (6,))
    made = part_messages.unpack_part(content.value("solver", (str, dict, list)), {})
    made.local_steps(10)


def read_family(place: Path) -> None:
    """Read the records of a family's members."""
    for record in read_records(place):
        record.summary()


def read_ledger(place: Path) -> None:
    """Add up what a ledger says."""
    for found in summarise_ledgers(entries_below(place)):
        str(found)


def read_schema(place: Path) -> None:
    """Read a schema and use it."""
    schema = eq.data.Schema.load(place / "schema.json")
    schema.transform({"who": ["a", "b"], "age": [1.0, None], "town": ["a", "zz"], "y": ["x", "y"]})


def read_parquet(place: Path) -> None:
    """Read a table of Parquet."""
    eq.data.parquet(place / "data.parquet", client="client", target="y")


def read_study_file(place: Path) -> None:
    """Check a study."""
    read_study(place / "study.toml", out=place / "out")


def read_search_file(place: Path) -> None:
    """Check a search."""
    read_search(place / "search.toml")


READERS: dict[str, Callable[[Path], None]] = {
    "configuration": read_configuration, "checkpoint": read_checkpointed, "run folder": read_run_folder, "store": read_store,
    "arrays": read_arrays, "leaf": read_leaf, "packed JSON": read_packed_json, "table": read_table, "message": read_message,
    "tree store": read_store, "private folder": read_run_folder, "family": read_family, "ledger": read_ledger,
    "schema": read_schema, "parquet": read_parquet, "study": read_study_file, "search": read_search_file,
}  # fmt: skip


def try_inputs(chance: random.Random, folder: Path, counts: Counter[str]) -> None:
    """Some inputs of one kind, read by one child."""
    kind = chance.choice([name for name in READERS for _ in range(3 if name in ("configuration", "table", "leaf") else 2)])
    valid = samples()[kind]
    places = []
    for number in range(TOGETHER):
        place = folder / str(number)
        changed = chance.choice(sorted(valid))
        content = dict(valid)
        content[changed] = mutated(chance, content[changed])
        if chance.random() < 0.004 and (packed := bomb(kind)) is not None:
            content = packed
        elif number == 0 and chance.random() < 0.01 and (packed := wide(kind)) is not None:
            content = packed
            counts["100,000 columns"] += 1
        for name, written in content.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(written)
        places.append((place, changed))
    note = folder / "note"
    code = in_child(lambda: _read_all(READERS[kind], places, note, folder), limit=CLOCK)
    done = note.read_text().splitlines() if note.exists() else []
    counts["inputs"] += sum(line.startswith("begun") for line in done)
    for word in ("read", "refused"):
        counts[word] += sum(line.startswith(word) for line in done)
    if code != 0:
        last = int(next(line.split()[1] for line in reversed(done) if line.startswith("begun")))
        place, changed = places[last]
        said = [line for line in done if line.startswith("raised")]
        content = (place / changed).read_bytes() if (place / changed).exists() else b""
        shown = content.decode(errors="backslashreplace")[:3000] if len(content) < 10_000 else f"{len(content)} bytes"
        raise Finding(f"{kind}: exit code {code}", said=said, file=changed, content=shown)


def _read_all(read: Callable[[Path], None], places: list[tuple[Path, str]], note: Path, folder: Path) -> None:
    """Read inputs one after another, in bounds, and note each; ends at the first that breaks a promise."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    warnings.simplefilter("ignore")
    away = folder / "away"
    away.mkdir()
    os.chdir(away)
    before = {path for path, _ in places}
    with note.open("a", buffering=1) as log:
        for number, (place, _) in enumerate(places):
            log.write(f"begun {number}\n")
            try:
                read(place)
                log.write("read\n")
            except EquipoiseError as refusal:
                log.write("refused\n" if str(refusal).strip() else "raised an error without words\n")
            except BaseException as failure:
                log.write("raised " + " | ".join(traceback.format_exception(failure)[-6:]).replace("\n", " ")[:1500] + "\n")
                os._exit(72)
            if any(away.iterdir()) or set(folder.iterdir()) - before - {note, away}:
                log.write("raised: something was written outside the folder\n")
                os._exit(73)
