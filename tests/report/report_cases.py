"""Small studies, and a page taken apart, for the tests of the report."""

import json
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import torch
from torch import nn

import equipoise as eq
from equipoise.report.page import plotly_js

VOID = {"meta", "br", "hr", "img", "link", "input"}
FIGURES = {"histogram", "percentiles", "tradeoff", "sizes", "curves", "selected", "gains"}
ALL_TRAINED = {"selected"}  # a figure of methods that do not train all clients drawn
OF_SEVERAL = {"tradeoff", "gains"}  # figures that a single method does not have
DITTO = eq.Algorithm(personal=eq.personal.Ditto(strength=0.5, solver=eq.solvers.SGD(lr=0.3, epochs=3)))
METHODS = {"FedAvg": eq.Algorithm(), "Δ-FL 0.5": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
EVIL = '<b>&"x"</b></script><script>alert(1)</script><!-- %{x} &lt; $a$ \u2028'


class Page(HTMLParser):
    """The text by id, the rows of the tables, every tag with its attributes; refuses tags that do not nest.

    plotly.js, which must be there once, is not in `source`.
    """

    def __init__(self, path):
        super().__init__()
        whole = Path(path).read_text(encoding="utf-8")
        library = f"<script>{plotly_js()}</script>"
        assert whole.count(library) == 1
        self.source = whole.replace(library, "")
        self.tags, self.rows, self.by_id, self.by_code, self._open = [], {}, {}, {}, []
        self.feed(self.source)
        self.close()
        assert self._open == []
        self.data = json.loads(self.by_id["figure-data"])

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))
        if tag == "tr":
            table = next(a["id"] for t, a in reversed(self._open) if t == "table")
            self._row = []
            self.rows.setdefault(table, []).append(self._row)
        elif tag in ("td", "th"):
            self._row.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        text = data.replace("\u00a0", " ")
        if any(t in ("td", "th") for t, _ in self._open):
            self._row[-1] += text
        for _, attrs in self._open:
            for key, found in (("id", self.by_id), ("data-code", self.by_code)):
                if key in attrs:
                    found[attrs[key]] = found.get(attrs[key], "") + text

    @property
    def headline(self):
        return self.by_id["headline"]

    @property
    def figures(self):
        return {a["id"].removeprefix("figure-") for t, a in self.tags if t == "figure"}

    def cell(self, method, column):
        header, *rows = self.rows["table-numbers"]
        row = next(r for r in rows if r[0] == method)
        return row[header.index(column)]


def offline(page):
    """Nothing is fetched, only our scripts run, and no number that does not exist is shown."""
    assert not any(tag in {"link", "iframe", "object", "embed", "base", "form"} for tag, _ in page.tags)
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    run = [attrs for attrs in scripts if attrs.get("type") != "application/json"]
    assert run == [{}]  # and plotly.js, which was taken out
    held = {attrs["id"] for attrs in scripts if attrs not in run}
    assert {"figure-data"} <= held <= {"figure-data", "clients-data", "knob-data"}
    assert "http://" not in page.source
    assert "https://" not in page.source
    assert "@import" not in page.source
    for _, attrs in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert attrs.get(name, "#").startswith(("#", "data:"))
        assert not any(name.startswith("on") for name in attrs)
    assert "url(" not in page.source
    assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", page.source)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    assert page.figures == set(page.data["figures"])


def numbers(text):
    return [float(n) for n in re.findall(r"\d+\.\d+", text)]


def clients(count, classes=3, *, prefix="c", seed=0, spread=True, regression=False):
    """Clients whose classes and sizes differ."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for k in range(count):
        size = 8 + (5 * k) % 17 if spread else 12
        y = (torch.rand(size, generator=generator) ** (1 + k % 3) * classes).long()
        x = torch.randn(size, 4, generator=generator) + nn.functional.one_hot(y, 4) * (1.5 if k % 4 else 0.3)
        made.append((f"{prefix}{k}", x, 3 * x.sum(1) + k if regression else y))
    return eq.ClientSet.pack(made)


def federated(train=12, test=20, **options):
    return eq.FederatedData(clients(train, **options), test=clients(test, prefix="t", seed=1, **options))


def inside(count=20, **options):
    """The same clients in training and test, each with examples of its own for both: what personal models need."""
    return eq.data.split_examples(clients(count, **options), test=0.4)


def under_attack(**options):
    """A fifth of the clients sends poisoned updates, three times too long."""
    return eq.attacks.apply(inside(**options), eq.attacks.ModelReplacement(share=0.2, factor=3.0))


def softmax():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@dataclass(frozen=True)
class Spent:
    """A stand-in for what a run under differential privacy says it has spent."""

    epsilon: float
    delta: float = 1e-4
    adjacency: str = "zero out one client"
    method: str = "pld"
    rounds: int = 6
    epsilon_server: float = 0.0
    nominal: bool = False

    def __str__(self):
        return f"ε = {self.epsilon:.4g} at δ = {self.delta:g} ({self.adjacency}, {self.method}, {self.rounds} rounds)"


def with_rounds(run, change):
    """The run with another report of every round."""
    return replace(run, history=replace(run.history, rounds=[replace(r, **change(r.round)) for r in run.history.rounds]))


def private(run, spent=2.0):
    """The run as if it had spent ε, the same in every round."""
    each = spent / len(run.history.rounds)
    return replace(with_rounds(run, lambda t: {"epsilon": each * (t + 1)}), epsilon=Spent(spent))


def rejecting(run):
    """The run as if updates had been left out: c1's in rounds 1, 2 and 3, c2's in round 3, nobody's in round 4, c1's in 5."""
    left_out = {0: ("c1",), 1: ("c1",), 2: ("c1", "c2"), 4: ("c1",)}
    return with_rounds(run, lambda t: {"rejected": left_out.get(t, ())})


def squared(outputs, targets):
    return (outputs.squeeze(1) - targets).square()


def regressed():
    """Two methods on a task whose error is its loss."""
    torch.manual_seed(0)
    algorithms = {"mean": eq.Algorithm(solver=eq.solvers.SGD(lr=0.01)), "same": eq.Algorithm(solver=eq.solvers.SGD(lr=0.02))}
    return eq.compare(algorithms, nn.Linear(4, 1), federated(regression=True), rounds=4, clients_per_round=6, loss=squared)


def with_errors(run, errors, **changed):
    """The run as if its test clients had these errors."""
    table = run.clients.where("test").take(torch.arange(len(errors)))
    found = torch.tensor(errors, dtype=torch.float64)
    return replace(run, clients=replace(table, error=found, loss=2 * found), **changed)


def study_of(run, **methods):
    """A study by hand: for each method a list of errors per seed."""
    return [
        with_errors(run, errors, name=name, seed=seed) for name, seeds in methods.items() for seed, errors in enumerate(seeds)
    ]


def made_of(trained, errors, *, seeds=3, validation=None, version=lambda seed: ""):
    """A comparison with known errors of the six test clients, by method and seed, and perhaps of the validation clients."""
    results = {}
    for name, by_seed in errors.items():
        runs = []
        for run, values in zip(trained.results["FedAvg"][:seeds], by_seed, strict=False):
            rows = run.clients.where("test")
            rows = replace(rows, error=torch.tensor(values, dtype=torch.float64), trivial_error=None)
            if validation is not None:
                other = replace(rows, split=("validation",) * 6, error=torch.full((6,), validation[name], dtype=torch.float64))
                rows = joined(other, rows)
            runs.append(replace(run, name=name, clients=rows, data_version=version(run.seed)))
        results[name] = runs
    return eq.Comparison(results)


def joined(*tables):
    """The rows of several tables of shared models."""
    columns = {name: torch.cat([getattr(t, name) for t in tables]) for name in ("seen", "size", "loss", "error")}
    return eq.ClientTable(sum((t.client for t in tables), ()), sum((t.split for t in tables), ()), **columns)


def table_of(wrong, sizes, **others):
    """A table of test clients c0, c1, … with so many wrong rows of so many."""
    count = len(wrong)
    error = torch.tensor(wrong, dtype=torch.float64) / torch.tensor(sizes)
    made = eq.ClientTable(
        tuple(f"c{k}" for k in range(count)), ("test",) * count, torch.zeros(count, dtype=torch.bool), torch.tensor(sizes),
        loss=error, error=error, trivial_error=torch.full_like(error, 0.25), trivial_answer="most frequent class",
    )  # fmt: skip
    return replace(made, **others)


def of_test_clients(run, wrong, sizes, **changes):
    """The run with the clients of `table_of`."""
    return replace(run, clients=table_of(wrong, sizes), **changes)


def known(run, own, shared, malicious=()):
    """The run with test clients whose errors at their own and at the shared model are given."""
    n = len(shared)
    names = tuple(f"c{k}" for k in range(n))
    own_error = None if own is None else torch.tensor(own, dtype=torch.float64)
    table = eq.ClientTable(
        names, ("test",) * n, torch.ones(n, dtype=torch.bool), torch.arange(10, 10 + n),
        loss=torch.tensor(shared, dtype=torch.float64), error=torch.tensor(shared, dtype=torch.float64),
        malicious=torch.tensor([name in malicious for name in names]), personal_loss=own_error, personal_error=own_error,
    )  # fmt: skip
    return replace(run, clients=table)
