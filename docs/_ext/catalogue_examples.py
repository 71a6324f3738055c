"""One line of Python per part of the catalogue, with the plain values that the page of combinations uses."""

import functools
import importlib

from combinations_page import KINDS
from combinations_page import VALUES as PART_VALUES
from public_names import public_modules

from equipoise.experiment import catalog

WRITTEN = {  # values whose text is not their Python
    "groups": "str", "aggregator": "eq.aggregators.Median()",
    "terms": "(0.5, eq.risk.Mean()), (0.5, eq.risk.Superquantile(tail=0.5))",
}  # fmt: skip
_FULL = "sampler=eq.sampling.Full()"
COMPANIONS = {  # what a part cannot do without, as the page of combinations has it
    "WorstCase": _FULL, "Mocha": _FULL, "DPFTRL": _FULL,
    "NodePoisson": 'privacy=eq.privacy.DifferentialPrivacy(epsilon=5.0, delta=1e-3, clip=1.0, noise="distributed")',
}  # fmt: skip
# How a part of another kind is written; the kinds of the page of combinations are parts of an algorithm.
OTHERS = {
    "quantile": "quantile = {part}", "schedule": "algorithm = eq.Algorithm(solver=eq.solvers.SGD(schedule={part}))",
    "clip_rule": "rule = {part}", "attack": "attacked = eq.attacks.apply(eq.data.digits(), {part})", "engine": "engine = {part}",
    "model": "model = {part}", "data": "data = {part}",
}  # fmt: skip
# Names that need a file, a folder or a table of the reader's: their lines are checked against the signature, and not run.
WITH_FILES = {
    "equipoise.data.from_folders": 'data = eq.data.from_folders("clients", x="npy", y="cls")',
    "equipoise.data.from_hugging_face": 'data = eq.data.from_hugging_face(dataset, x="image", y="label", client="writer")',
    "equipoise.data.from_partitions": 'data = eq.data.from_partitions(partitioner, x="image", y="label")',
    "equipoise.data.glove": 'vectors = eq.data.glove("data")',
    "equipoise.data.imdb": 'x, y, vocabulary = eq.data.imdb("data", words=1000)',
    "equipoise.data.leaf": 'data = eq.data.leaf("leaf/data/shakespeare")',
    "equipoise.data.npz": 'clients = eq.data.npz("clients.npz", x="x", y="y", client="client")',
    "equipoise.data.csv": 'data = eq.data.csv("visits.csv", client="hospital", target="ill")',
    "equipoise.data.parquet": 'data = eq.data.parquet("visits.parquet", client="hospital", target="ill")',
    "equipoise.data.open_store": 'data = eq.data.open_store("store", test=0.2)',
    "equipoise.data.texts": 'data = eq.data.texts("sent140", "data")',
    "equipoise.data.write_table_store": 'eq.data.write_table_store("visits.csv", "store", client="hospital", target="ill")',
    "equipoise.models.freeze_lora_a": "model = eq.models.freeze_lora_a(model)",
    "equipoise.tracking.MLflow": 'observers = [eq.tracking.MLflow("tails", tracking_uri="sqlite:///mlflow.db")]',
    "equipoise.tracking.WandB": 'observers = [eq.tracking.WandB("tails", offline=True)]',
} | {f"equipoise.data.tabular.{name}": f'table = eq.data.tabular.{name}("data")'
     for name in ("abalone", "california_housing", "credit_default", "drug_qsar", "hiv1")} | {
     f"equipoise.data.{name}": f'data = eq.data.{name}("data")'
     for name in ("adult", "fashion_mnist", "femnist", "mocha", "omniglot", "shakespeare", "vehicle")}  # fmt: skip
VALUES = {"bound": 2.0, "rounds": 100, "features": 20, "classes": 10, "vocabulary": 80} | {
    name: value for name, value in PART_VALUES.items() if name not in ("bound", "rounds")
}


@functools.cache
def constructors() -> dict[str, str]:
    """Public name → a line that uses the part."""
    public = {id(getattr(importlib.import_module(module), name)): f"{module}.{name}"
              for module, names in public_modules().items() for name in names}  # fmt: skip
    found = {}
    for kind in (*KINDS, *OTHERS):
        for part in catalog.parts(kind):
            full = public.get(id(part.target))
            required = [each for each in part.all_parameters if each.required]
            if full is None or any(each.name not in VALUES for each in required):
                continue
            terms = [WRITTEN["terms"]] if any(each.terms for each in required) else []
            values = [f"{each.python_name}={WRITTEN.get(each.name) or repr(VALUES[each.name])}"
                      for each in required if not each.terms]  # fmt: skip
            made = f"{full.replace('equipoise', 'eq', 1)}({', '.join([*terms, *values])})"
            needed = COMPANIONS.get(full.rpartition(".")[2])
            whole = f"algorithm = eq.Algorithm({', '.join(filter(None, (f'{kind}={made}', needed)))})"
            found[full] = OTHERS[kind].format(part=made) if kind in OTHERS else whole
    return found | WITH_FILES
