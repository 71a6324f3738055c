"""What combines with what: every pair of parts is put into an Algorithm, and the page shows what was refused and why."""

import html
import itertools
import warnings

from catalogue_page import table

import equipoise as eq
from equipoise.errors import EquipoiseError, EquipoiseNotice
from equipoise.experiment import catalog

KINDS = ("risk", "solver", "aggregator", "server", "sampler", "averaging", "personal", "privacy")
# Values of parameters without a default.
VALUES = {
    "tail": 0.5, "tilt": 1.0, "q": 1.0, "step": 0.1, "groups": str, "malicious": 1, "fraction": 0.2, "kept": "bias",
    "shared": "weight", "head": "bias", "clip": 1.0, "noise_multiplier": 1.0, "epsilon": 5.0, "delta": 1e-3, "rate": 0.5,
    "rounds": 10, "buffer": 5, "strength": 1.0, "pull": 1.0, "steps": 2, "lr": 0.1, "local_lr": 0.1, "inner_lr": 0.1,
    "weight": 0.5, "terms": ((0.5, eq.risk.Mean()), (0.5, eq.risk.Superquantile(tail=0.5))), "bound": 2.0, "bins": 16,
    "aggregator": eq.aggregators.Median(), "alpha": 0.1, "day": 24, "every": 10, "radius": 1.0, "penalty": 1.0,
}  # fmt: skip


def examples() -> dict[str, dict[str, object]]:
    """Kind → name → a part with plain parameters; some parts in a second form that other parts ask for."""
    made: dict[str, dict[str, object]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        for part in catalog.parts(kind):
            required = [p for p in part.all_parameters if p.required]
            terms = [t for p in required if p.terms for t in VALUES["terms"]]
            values = {p.python_name: VALUES[p.name] for p in required if not p.terms}
            name = part.python_path.rpartition(".")[2]
            made[kind][name] = part.target(*terms, **values)
    steps = eq.solvers.SGD(steps=2)
    secure = eq.privacy.SecureHistogram(bound=2.0, bins=16)
    private = eq.privacy.PrivateQuantile(bound=2.0, bins=16)
    made["risk"]["Superquantile, secure quantile"] = eq.risk.Superquantile(tail=0.5, quantile=secure)
    made["risk"]["Superquantile, private quantile"] = eq.risk.Superquantile(tail=0.5, quantile=private)
    made["solver"]["SGD with prox (FedProx)"] = eq.solvers.SGD(prox=0.1)
    made["solver"]["Scaffold, counted in steps"] = eq.solvers.Scaffold(steps)
    made["aggregator"]["FedNova, public steps"] = eq.aggregators.FedNova(steps=2.0)
    made["privacy"]["DifferentialPrivacy, distributed noise"] = eq.privacy.DifferentialPrivacy(
        epsilon=5.0, delta=1e-3, clip=1.0, noise="distributed"
    )
    return made


# What a part cannot do without; used unless the other part of the pair is of that kind.
COMPANIONS = {
    "WorstCase": {"sampler": eq.sampling.Full()},
    "Mocha": {"sampler": eq.sampling.Full()},
    "DPFTRL": {"sampler": eq.sampling.Full()},
    "Superquantile, private quantile": {"privacy": eq.privacy.DifferentialPrivacy(epsilon=5.0, delta=1e-3, clip=1.0)},
    "NodePoisson": {"privacy": eq.privacy.DifferentialPrivacy(epsilon=5.0, delta=1e-3, clip=1.0, noise="distributed")},
}


def tried(one: tuple[str, str, object], other: tuple[str, str, object]) -> str:
    """Why the two parts do not go together, in the words of the library; "" if they do."""
    parts = {}
    for _, name, _ in (one, other):
        parts |= COMPANIONS.get(name, {})
    parts |= {kind: part for kind, _, part in (one, other)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EquipoiseNotice)
            eq.Algorithm(**parts)
    except EquipoiseError as refusal:
        return " ".join(str(refusal).split())
    return ""


def page() -> str:
    """The page."""
    found = [(kind, name, part) for kind, parts in examples().items() for name, part in parts.items()]
    grid, refused, total = [], [], 0
    verdict: dict[tuple[int, int], str] = {}
    for (i, one), (j, other) in itertools.combinations(enumerate(found), 2):
        if one[0] != other[0]:
            total += 1
            verdict[i, j] = verdict[j, i] = reason = tried(one, other)
            if reason:
                refused.append((one, other, reason))
    rows = []
    for one, other, reason in refused:
        first, _, rest = reason.partition(". ")
        why = [html.escape(first + ("." if rest else "")), html.escape(rest)]
        rows.append([f"<code>{html.escape(one[1])}</code>", one[0], f"<code>{html.escape(other[1])}</code>", other[0], *why])
    head = '<th scope="col" class="corner">part</th>' + "".join(
        f'<th scope="col" data-kind="{kind}"><span>{html.escape(name)}</span></th>' for kind, name, _ in found
    )
    for i, (kind, name, _) in enumerate(found):
        cells = []
        for j, (other_kind, other_name, _) in enumerate(found):
            if kind == other_kind:
                cells.append('<td class="same"></td>')
            elif verdict[i, j]:
                label = html.escape(f"{name} with {other_name}: {verdict[i, j]}", quote=True)
                cells.append(f'<td class="no" title="{label}">✗</td>')
            else:
                cells.append('<td class="yes">✓</td>')
        grid.append(
            f'<tr data-kind="{kind}"><th scope="row">{html.escape(name)} <small>{kind}</small></th>{"".join(cells)}</tr>'
        )
    matrix = (
        '<div class="wide-table matrix-box" tabindex="0" role="region" aria-label="Matrix of combinations">'
        f'<table class="matrix" id="pairs"><thead><tr>{head}</tr></thead><tbody>{"".join(grid)}</tbody></table></div>'
    )
    heads = ("part", "kind", "with", "kind", "why not", "what to do")
    return "\n".join([
        "# What goes with what", "",
        "For everybody who combines methods. After this page you know which two parts an `Algorithm` accepts together, and why it",
        "refuses the others. It is made by constructing every pair, so it says what the library does.", "",
        f"There are {len(found)} parts and {total} pairs of different kinds: {total - len(refused)} work together,",
        f"{len(refused)} are refused. A part that needs another one is tested together with it: `WorstCase`, `Mocha` and `DPFTRL`",
        "with `sampling.Full()`, a private quantile with `DifferentialPrivacy`, and `NodePoisson` with distributed noise. Other parts",
        "have their defaults.", "",
        "## Matrix", "", "✓ goes together, ✗ is refused; the reason is in the table below and appears when you point at the cell.",
        "Choose kinds to see a part of it.", "", "```{raw} html", '<div id="matrix-kinds"></div>', matrix, "```", "",
        "## Refused pairs", "", "Type the name of a part to see all that it does not go with. Click a heading to sort.", "",
        table("refused", heads, rows, "Refused pairs", id="refused", data_filter="Filter refused pairs"), "",
    ])  # fmt: skip
