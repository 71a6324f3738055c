"""The runs that are killed: by `train`, `train_family` or `train_many` with a checkpoint, run folders, and studies."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import equipoise as eq
from campaign_drivers import random_parts as parts
from campaign_drivers.input_samples import samples
from campaign_drivers.scenes import Scene, draw_scene
from equipoise.core import files
from equipoise.engines import Simulator
from equipoise.errors import EquipoiseError, EquipoiseNotice, NotWritten
from equipoise.experiment import folder as folders
from equipoise.experiment import toml, worker
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.experiment.recorded import algorithm_table
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.study import prepare, read_study
from equipoise.export import onnx_files
from equipoise.runs.checkpoint import Checkpoints
from equipoise.types import Observer

ROUNDS = 8
PAUSE = 0.004  # seconds after a round, so that kills come at all moments and not only in the first ones
ENDED = "ended.json"
SHIFTED = {"name": "label_shift", "train_clients": 8, "validation_clients": 3, "test_clients": 3, "examples": 6}
FRAME = {"client": "client", "target": "y", "split_by": "examples", "test": 0.5}
LARGE = ("label_shift", "synthetic", "digits", "store")  # data of eight clients or more; the others have two or three
METHODS = {"plain": {}, "tail": {"risk": {"name": "superquantile", "tail": 0.5}}}


@cache
def configured() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Tables [data] and [model] of run folders, by the name of the data; those of files are written now."""
    place, softmax = Path(tempfile.mkdtemp(prefix="campaign-data-")), {"name": "softmax"}
    valid = samples()
    for kind in ("arrays", "table", "parquet", "leaf", "store"):
        for name, content in valid[kind].items():
            (place / kind / name).parent.mkdir(parents=True, exist_ok=True)
            (place / kind / name).write_bytes(content)
    tabular = {"name": "tabular", "hidden": [4]}
    return {
        "label_shift": (SHIFTED, softmax),
        "synthetic": ({"name": "synthetic", "clients": 8, "features": 5, "classes": 3}, {"name": "mlp", "hidden": [4]}),
        "gaussian_means": ({"name": "gaussian_means", "examples": 6}, {"name": "mean_estimator"}),
        "digits": ({"name": "digits", "clients": 8}, softmax),
        "npz": ({"name": "npz", "path": str(place / "arrays" / "data.npz")}, softmax),
        "csv": ({"name": "csv", "path": str(place / "table" / "data.csv"), **FRAME}, tabular),
        "parquet": ({"name": "parquet", "path": str(place / "parquet" / "data.parquet"), **FRAME}, tabular),
        "store": ({"name": "store", "path": str(place / "store")}, softmax),
        "leaf": ({"name": "leaf", "folder": str(place / "leaf")}, softmax),
    }


def prepare_data() -> None:
    """Make all data, and import what they need: a child that has become another user may not read Python's own files."""
    import encodings.utf_8_sig  # noqa: F401 — by which configurations are read

    from equipoise.report import page  # noqa: F401 — with what draws it

    for data, model in configured().values():
        build(RunConfig.of({"data": data, "model": model, "train": {"rounds": 1, "clients_per_round": 2}}))


class Pause(Observer):
    """Waits after every round."""

    def on_round(self, report: Any) -> None:
        """A round is over."""
        time.sleep(PAUSE)


@dataclass(frozen=True)
class KilledRun:
    """A run of some kind, which a call of `go_on` makes or goes on with."""

    mode: str
    chosen: parts.Chosen
    scene: Scene
    workers: int  # 0: the loop engine
    every: int
    data: str = "label_shift"  # of run folders
    threads: int = 1  # of torch
    report: bool = False  # of run folders: also the page

    def words(self) -> dict[str, Any]:
        """The run for a report."""
        about = {"mode": self.mode, "workers": self.workers, "every": self.every, "data": self.data}
        about |= {"threads": self.threads, "report": self.report}
        return about | {"parts": self.chosen.words(), "scene": self.scene.words()}

    def go_on(self, place: Path) -> None:
        """The whole run, or what is left of it."""
        torch.set_num_threads(self.threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EquipoiseNotice)
            {"folder": self._folder, "family folder": self._folder, "study": self._study}.get(self.mode, self._train)(place)

    def _train(self, place: Path) -> None:
        saving = Checkpoints(place / "run.safetensors", every=self.every)
        given = {"rounds": ROUNDS, "observers": [Pause()], "checkpoint": saving, "evaluate_every": 3}
        given |= self.scene.options() | {"engine": Simulator(workers=self.workers) if self.workers else "loop"}
        model, data, algorithm = self.scene.model(), self.scene.data(), self.chosen.algorithm()
        if self.mode == "family":
            results = list(eq.train_family(model, data, algorithm, tails=[1.0, 0.5], **given).results.values())
        elif self.mode == "many":
            given.pop("seed")
            many = eq.train_many(model, data, algorithm, seeds=2, **given)
            results = [run for runs in many.results.values() for run in runs]
        else:
            results = [eq.train(model, data, algorithm, **given)]
        files.write_atomically(place / ENDED, json.dumps([left_by(result) for result in results]).encode())

    def _folder(self, place: Path) -> None:
        """As `equipoise run` and `equipoise run --resume` do."""
        onnx_files.why_no_onnx = lambda: "it takes long"  # type: ignore[assignment]
        run_folder = RunFolder(place / "run")
        if run_folder.config.exists():
            if run_folder.finished:
                return
            config = RunConfig.read(folders.to_resume(run_folder.path).config, code="resume")
        else:
            config = RunConfig.of(self._table() | ({"family": {"tails": [1.0, 0.5]}} if self.mode == "family folder" else {}))
        prepared = build(config)
        if not run_folder.config.exists():
            folders.claim(run_folder.path)
        folders.run(prepared, run_folder, observers=[Pause()], progress=False, report=self.report)

    def _study(self, place: Path) -> None:
        """As `equipoise compare` does, in one process."""
        described = place.parent / "study.toml"
        if not described.exists():
            table = self._table()
            table["train"].pop("seed")
            described.write_text(toml.dumps({"study": {"seeds": 2}, "methods": METHODS, **table}))
        runs = read_study(described, out=place / "study")
        prepare(runs)
        for run in runs:
            if not run.folder.finished and worker.main(str(run.folder.path)) != 0:
                failed = f"{run.folder.path} failed: --resume"  # and has said why
                raise EquipoiseError(failed) if files.recorder is None else NotWritten(failed)
            folders.read_record(run.folder.path)

    def _table(self) -> dict[str, Any]:
        """A configuration."""
        engine = {"engine": "simulator", "workers": self.workers} if self.workers else {"engine": "loop"}
        train = {
            "rounds": ROUNDS,
            "clients_per_round": 5 if self.data in LARGE else 2,
            "seed": 3,
            "evaluate_every": 3,
            "checkpoint_every": self.every,
        }
        data, model = configured()[self.data]
        algorithm = {k: v for k, v in algorithm_table(self.chosen.algorithm()).items() if k in self.chosen.parts}
        return {"data": data, "model": model, "algorithm": algorithm, "train": train | engine}

    def ended(self, place: Path) -> bool:
        """Whether the run has come to its end."""
        if self.mode == "study":
            runs = list((place / "study").glob("*/config.toml"))
            return len(runs) == 4 and all(RunFolder(path.parent).finished for path in runs)
        return RunFolder(place / "run").finished if "folder" in self.mode else (place / ENDED).exists()

    def left_in(self, place: Path) -> dict[str, Any]:
        """All numbers that a finished run has left, exactly, without what clocks say."""
        if (place / ENDED).exists():
            runs = json.loads((place / ENDED).read_bytes())
            return {f"{number}: {key}": value for number, run in enumerate(runs) for key, value in run.items()}
        found: dict[str, Any] = {}
        for path in sorted(place.rglob("*")):
            name = str(path.relative_to(place))
            if path.suffix in (".parquet", ".npy", ".toml") or (path.name == "model.safetensors"):
                if "checkpoint" not in name:
                    found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            elif path.name == "rounds.jsonl":
                events = [json.loads(line) for line in path.read_text().splitlines()]
                for event in events:
                    event.pop("seconds", None)
                events = [event for event in events if event["event"] not in ("start", "stopped")]
                found[name] = sorted(events, key=lambda event: event.get("run", ""))  # each run in its own order
            elif path.name == "report.html":  # its times differ
                found[name] = path.read_text(encoding="utf-8").rstrip().endswith("</html>")
            elif path.name.endswith((".tmp", ".part")):
                found[name] = "left behind"
        return found


def left_by(result: eq.Result) -> dict[str, Any]:
    """All numbers of a result, exactly, without what clocks say."""
    rows = result.clients
    state = {name: value for name, value in result.model.state_dict().items() if value.is_floating_point()}
    found: dict[str, Any] = {name: value.double().numpy().tobytes().hex() for name, value in state.items()}
    columns = {name: rows[name] for name in rows.columns if name not in ("client", "split")}
    found |= {f"column {name}": value.numpy().tobytes().hex() for name, value in columns.items()}  # type: ignore[union-attr]
    found["clients"] = [rows.client, rows.split]
    if result.personal is not None:
        found["models"] = result.personal.params(list(result.personal.ids)).double().numpy().tobytes().hex()
    found["rounds"] = [repr({k: v for k, v in vars(r).items() if k != "seconds"}) for r in result.history.rounds]
    found["points"] = [repr(point) for point in result.history.points]
    found["stopped"] = repr(result.history.stopped)
    found["epsilon"] = repr(result.epsilon)
    return found


def draw_run(chance: random.Random) -> KilledRun:
    """A run that is not refused at construction."""
    mode = chance.choice([*["train"] * 5, "family", "many", "folder", "folder", "family folder", "study"])
    workers, every = chance.choice([0, 0, 0, 1, 1, 1, 2]), chance.choice([1, 1, 2, 3])
    threads, report = chance.choice([1, 1, 1, 2, 3]), chance.random() < 0.3
    while True:
        chosen, scene = parts.draw(chance, most=3), draw_scene(chance)
        if "family" in mode:
            chosen = parts.Chosen({k: v for k, v in chosen.parts.items() if k not in ("risk", "personal", "privacy")})
        if mode in ("folder", "family folder", "study"):
            scene = Scene()
        if mode == "study":
            chosen = chosen.without("risk").without("sampler").without("privacy").without("solver").without("aggregator")
        data = chance.choice(["label_shift", *configured()]) if mode in ("folder", "study") else "label_shift"
        try:
            run = KilledRun(mode, chosen, scene, workers, every, data, threads, report and "folder" in mode)
            chosen.algorithm()
            if scene == Scene() and mode not in ("train", "family", "many"):
                RunConfig.of(run._table()).text()  # TypeError, ConfigError: parts that only Python can give
        except (EquipoiseError, TypeError):
            continue
        return run
