"""What is done with a run: trained, killed and resumed, trained beside others, judged, or asked over a network."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gate import adapter
from benchmarks.gate.adapter import Numbers, Prepared
from benchmarks.gate.cases import Case, merged, refused_table, sections
from benchmarks.gate.cases import refusals as refused_cases


@dataclass
class Left:
    """What a run leaves: numbers by name, and facts that are compared as they are."""

    numbers: Numbers = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # for information: not compared


class Killed(Exception):
    """Ends a run in its middle."""


def too_long(*_: Any) -> None:
    """Ends a run that hangs."""
    raise TimeoutError("the run took too long")


def apart(one: Numbers, other: Numbers) -> list[str]:
    """The names of what is not equal bit for bit."""

    def same(name: str) -> bool:
        a, b = one.get(name), other.get(name)
        return a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()

    return [name for name in sorted(one.keys() | other.keys()) if not same(name)]


def do(case: Case) -> Left:
    """Do what a case asks for. An error that the library raises is a fact; any other error is a failure."""
    import equipoise as eq

    left = Left()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            HOW[case.how](case, left)
        except eq.errors.EquipoiseError as failure:
            left.facts["error"] = adapter.code_of(failure)
            left.numbers |= (
                adapter.as_arrays(adapter.numbers_of_history(failure.history)) if hasattr(failure, "history") else {}
            )
            if left.facts["error"].partition(" ")[0] != case.given.get("expect"):
                left.facts["failed"] = str(failure)[:400]
        except Exception as failure:
            left.facts["failed"] = "".join(traceback.format_exception(failure)[-5:])
    left.facts.setdefault("notices", adapter.notices_in(list(warned)))
    if "expect" in case.given and "error" not in left.facts:
        left.facts["failed"] = f"it did not raise {case.given['expect']}"
    return left


# ---------------------------------------------------------------------------------------------------------------- one run


def train(case: Case, left: Left) -> None:
    """One run of `train`; on the simulator it is killed in its second round, too, and goes on."""
    given = _prepared(case)
    result = _train(given)
    left.numbers, left.facts["clients"] = adapter.numbers_of(result), adapter.ids_of(result)
    if given.conformal is not None:
        judged = result.with_conformal(given.data, miss=given.conformal)
        left.numbers |= {f"conformal/{k}": v for k, v in adapter.numbers_of_table(judged.clients).items()}
    if case.engine == "simulator":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            left.about["paths"] = adapter.path_taken(_prepared(case))
    if case.given.get("resume", case.engine == "simulator"):
        again = _resumed(case, lambda fresh, **more: adapter.numbers_of(_train(fresh, **more)))
        _must_equal(left, again, "resumed")


def _prepared(case: Case) -> Prepared:
    return adapter.prepared(case.table, case.given.get("choice"), case.given.get("engine"))


def _train(given: Prepared, **more: Any) -> Any:
    import equipoise as eq

    return eq.train(given.model, given.data, given.algorithm, progress=False, **given.options | more)


def _must_equal(left: Left, again: Numbers, what: str) -> None:
    wrong = apart(left.numbers, again)
    wrong = [name for name in wrong if name in again or not name.startswith("conformal/")]
    if wrong:
        left.facts["failed"] = f"{what}: not equal in {', '.join(wrong[:6])}"


class _Stops:
    """An observer that ends a run in its second round: by an error, or by Ctrl-C after the first."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_round(self, report: Any) -> None:
        if self.how == "interrupt" and report.round == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # the signal arrives
        if self.how != "interrupt" and report.round == 1:
            raise Killed


def _resumed(case: Case, run: Callable[..., Numbers]) -> Numbers:
    """A run that is killed in its second round and goes on from its checkpoint."""
    import equipoise as eq

    how = "interrupt" if case.given.get("resume") == "interrupt" else "error"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder) / "run.safetensors"
        first, second = _prepared(case), _prepared(case)
        with suppress(eq.errors.ObserverFailed, KeyboardInterrupt):
            run(first, checkpoint=adapter.save_to(file, first.checkpoint_every), observers=[_Stops(how)])
        return run(second, checkpoint=adapter.save_to(file, second.checkpoint_every))


# ---------------------------------------------------------------------------------------------------------- several together


def family(case: Case, left: Left) -> None:
    """A family: its members, the point between two of them, and what clients choose."""
    left.numbers = _family(_prepared(case))
    if case.given.get("resume", case.engine == "simulator"):
        _must_equal(left, _resumed(case, _family), "resumed")


def _family(given: Prepared, **more: Any) -> Numbers:
    import equipoise as eq

    made = eq.train_family(given.model, given.data, given.algorithm, progress=False, **given.options | given.family | more)
    found: Numbers = {}
    for value, result in made.results.items():
        found |= {f"{value}/{name}": each for name, each in adapter.numbers_of(result).items()}
    middle = made.at((made.values[0] + made.values[1]) / 2, interpolate=True)
    found |= adapter.as_arrays({f"between/{name}": value for name, value in middle.state_dict().items()})
    each_client = [given.data.test.take([k]) for k in range(len(given.data.test))]
    found["chosen"] = np.array([made.choose(client) for client in each_client])
    table = made.comparison().results["family"][0].clients
    return found | {f"family/{name}": each for name, each in adapter.numbers_of_table(table).items()}


def _algorithms(case: Case) -> dict[str, Any]:
    found = {}
    for name, method in case.given["methods"].items():
        found[name] = adapter.prepared(merged(case.table, sections(method))).algorithm
    return found


def many(case: Case, left: Left) -> None:
    """Several methods with several seeds, together."""
    left.numbers = _many(case, "train_many", _prepared(case))
    if case.given.get("resume", case.engine == "simulator"):
        _must_equal(left, _resumed(case, lambda given, **more: _many(case, "train_many", given, **more)), "resumed")


def compare(case: Case, left: Left) -> None:
    """Several methods with several seeds, one after another."""
    left.numbers = _many(case, "compare", _prepared(case))


def _many(case: Case, function: str, given: Prepared, **more: Any) -> Numbers:
    import equipoise as eq

    options = given.options | {"seeds": case.given.get("seeds", 2), "progress": False} | more
    del options["seed"]
    if function == "compare":
        made = eq.compare(_algorithms(case), given.model, given.data, **options)
    else:
        made = eq.train_many(given.model, given.data, _algorithms(case), **options)
    return {
        f"{name}, {run.seed}/{key}": value
        for name, runs in made.results.items() for run in runs for key, value in adapter.numbers_of(run).items()
    }  # fmt: skip


def tune(case: Case, left: Left) -> None:
    """A search over rates of the solver."""
    import equipoise as eq

    given, rates = _prepared(case), case.given["space"]
    options = {key: value for key, value in given.options.items() if key not in ("seed", "evaluate_clients")}
    found = eq.tune(
        lambda lr: replace(given.algorithm, solver=replace(given.algorithm.solver, lr=lr)), {"lr": rates}, given.model,
        given.data, seeds=2, **options, **({"trials": case.given["seeds"]} if "seeds" in case.given else {}),
    )  # fmt: skip
    left.numbers = adapter.as_arrays({"values": [each.values["lr"] for each in found.trials], "best": found.values["lr"]})


# ------------------------------------------------------------------------------------------------------------------ judged


def evaluate(case: Case, left: Left) -> None:
    """A trained model on data that it has not seen."""
    import equipoise as eq

    given = _prepared(case)
    result = _train(given)
    other = adapter.prepared(merged(case.table, {"data": {"seed": 9, "test": 0.5}})).data
    shared = {key: given.options[key] for key in ("loss", "error", "metrics", "engine")}
    for name, data in (("own", given.data), ("other", other), ("set", other.train)):
        found = eq.evaluate(result.model, data, **shared).clients
        left.numbers |= {f"{name}/{key}": value for key, value in adapter.numbers_of_table(found).items()}


def predict(case: Case, left: Left) -> None:
    """What a model says about rows of the table that it was trained on."""
    given = _prepared(case)
    result = _train(given)
    left.numbers = adapter.numbers_of(result)
    table = result.schema.predict(result.model, given_path(case))
    columns = table.to_pydict() if hasattr(table, "to_pydict") else {name: list(table[name]) for name in table.columns}
    left.numbers |= adapter.as_arrays({f"predicted/{name}": values for name, values in columns.items()})


def given_path(case: Case) -> Path:
    """The file of a table."""
    return Path(case.table["data"]["path"])


def command(case: Case, left: Left) -> None:
    """`equipoise run` of the configuration: the files that it leaves."""
    import subprocess
    import sys

    import pyarrow.parquet
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "run.toml", Path(folder) / "out"
        file.write_text(toml_of(case.table), encoding="utf-8")
        called = [sys.executable, "-m", "equipoise", "run", str(file), "--out", str(out)]
        done = subprocess.run(called, capture_output=True, text=True, check=False)
        left.facts["exit"] = done.returncode
        if done.returncode:
            left.facts["failed"] = done.stderr[-400:]
            return
        for path in sorted(out.rglob("*.safetensors")):
            if "checkpoint" not in path.parts:
                left.numbers |= {f"{path.relative_to(out)}/{name}": value for name, value in load_file(path).items()}
        for path in sorted(out.rglob("clients.parquet")):
            columns = pyarrow.parquet.read_table(path, partitioning=None).to_pydict()
            numeric = {
                name: values for name, values in columns.items() if all(isinstance(v, bool | int | float) for v in values)
            }
            left.numbers |= adapter.as_arrays({f"{path.relative_to(out)}/{name}": values for name, values in numeric.items()})


def toml_of(table: dict[str, Any]) -> str:
    """A configuration as text."""
    import json

    def inline(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {inline(each)}" for key, each in value.items()) + "}"
        return "[" + ", ".join(map(inline, value)) + "]" if isinstance(value, list) else json.dumps(value)

    return "".join(f"[{name}]\n" + "".join(f"{k} = {inline(v)}\n" for k, v in each.items()) for name, each in table.items())


def refusals(folder: Path) -> Left:
    """The error of every combination that must be refused."""
    left, missing = Left(), []
    for name, run in refused_cases().items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                given = adapter.prepared(refused_table(run, folder))
                _family(given) if given.family else _train(given)
                missing.append(name)
            except Exception as failure:
                left.facts[name] = adapter.code_of(failure)
                missing += [] if adapter.is_refusal(failure) else [f"{name}: {failure!r}"]
    if missing:
        left.facts["failed"] = f"not refused: {'; '.join(missing)}"
    return left


# -------------------------------------------------------------------------------------------------------------- elsewhere


def federation(case: Case, left: Left) -> None:
    """Training by messages; with `resume` the server is killed in its second round, too, and goes on from its folder."""
    import equipoise as eq

    result = adapter.Federation(_prepared(case), case.given).train()
    left.numbers, left.facts["clients"] = adapter.numbers_of(result), adapter.ids_of(result)
    if case.given.get("resume"):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            place, nodes = Path(folder) / "run", adapter.Federation(_prepared(case), case.given)
            with suppress(eq.errors.ObserverFailed):
                nodes.train(folder=place, observers=[_Stops("error")])
            _must_equal(left, adapter.numbers_of(nodes.train(folder=place)), "resumed")
    if "close" in case.given:
        left.facts["close"] = case.given["close"]
    if "keep" in case.given:  # all else follows from the system's own randomness
        left.numbers = {k: v for k, v in left.numbers.items() if any(k.startswith(name) for name in case.given["keep"])}


def script(case: Case, left: Left) -> None:
    """Functions beside federations."""
    from benchmarks.gate import scripts

    for name in case.given["covers"]:
        if name in scripts.SCRIPTS:
            left.numbers |= adapter.as_arrays({f"{name}/{key}": value for key, value in scripts.SCRIPTS[name]().items()})


HOW: dict[str, Callable[[Case, Left], None]] = {
    each.__name__: each for each in (train, family, many, compare, tune, evaluate, predict, command, federation, script)
}
