"""The card of a model: what it was trained on and how, how every group of clients fares with it, and whom it leaves behind."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core.version import VERSION
from equipoise.core.words import markdown_text
from equipoise.metrics import summarise, summarise_metric
from equipoise.privacy.drowned_sums import DROWNS, drowning_words
from equipoise.report.formats import listed
from equipoise.report.notices import FEW_EXAMPLES, absent_notices, notice
from equipoise.report.over_seeds import in_percent
from equipoise.risk.groups import Groups, checked_groups, group_name
from equipoise.runs.standing_out import of_record

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.run_record import RunRecord

FORMAT = "equipoise model card 1"
TAIL = ("percentile_90", "worst_10")  # the figures of the worst tenth
FEWEST = 5  # clients in a group whose figures are given: fewer would be nearly a client's own
KEYS = {"mean": "mean", "percentile_90": "90th percentile", "worst_10": "worst 10 %", "standard_deviation": "std. deviation"}


def card(run: RunRecord, *, about: Mapping[str, Any] | None = None, groups: Groups | None = None) -> dict[str, Any]:
    """The card as JSON. `about` adds what only the caller knows: the model's class, its parameters, its inputs.

    `groups` are groups of clients whose figures are wanted beside those that the run itself knows. Under secure sums or
    differential privacy no single client is named.
    """
    private, absent = run.protects_clients, run.clients.not_evaluated
    rows = run.clients.where(run.judged_on)
    families = list(group_families(run, rows.benign, groups))
    splits = {split: figures(run.clients.where(split), private=private) for split in dict.fromkeys(run.clients.split)}
    own = [split for split in splits if run.clients.where(split).has_own]
    shared = {split: figures(run.clients.where(split), shared=True, private=private) for split in own}
    of_groups = subgroups(run, rows, groups)
    sizes = [len(place) for family in families for place in family.values()]
    small = sum(size < FEWEST for size in sizes)
    withheld = len(sizes) - small - len(of_groups)
    hidden = private and rows.clients_in_mean is None and any(
        each[key] is None for each in (*splits.values(), *shared.values(), *of_groups) for key in KEYS
    )  # fmt: skip
    notes = [notice("card-shared")] if shared else []
    notes += [notice("card-weighted")] if len({each["mean_over"] for each in splits.values()}) > 1 else []
    notes += absent_notices(run.clients, run.judged_on, named=not private)
    notes += [notice("card-hidden", fewest=FEWEST)] if hidden else []
    notes += [notice("card-withheld", fewest=FEWEST, withheld=withheld, small=small)] if withheld or small else []
    return {
        "format": FORMAT,
        "model": {"name": run.name, **(about or {})},
        "data": {"name": run.data,
                 "clients": {split: each["clients"] + len(absent.get(split, {})) for split, each in splits.items()}},
        "method": {
            "algorithm": repr(run.algorithm), "rounds": run.rounds, "clients_per_round": run.clients_per_round,
            "seed": run.seed, "took_part": participation_words(run),
        },
        "judged_on": run.judged_on,
        "error_is": "loss" if run.error_is_loss else "error",
        "measured": run.measured,
        "in_percent": in_percent([run]),
        "metrics": splits,
        "shared_metrics": shared,
        "not_evaluated": {split: len(clients) for split, clients in absent.items()},
        "subgroups": of_groups,
        "withheld_groups": withheld,
        "small_groups": small,
        "notes": [str(each) for each in notes],
        "left_behind": left_behind(rows, private=private),
        "privacy": privacy_words(run, int((about or {}).get("parameters", 0))),
        "made_with": {"equipoise": VERSION, "torch": str(torch.__version__)},
    }  # fmt: skip


def participation_words(run: RunRecord) -> str:
    """In how many rounds of a federation nobody trained or clients were missing, and which sites stood out; else empty.

    Under differential privacy who took part is for the operator alone.
    """
    rounds = run.history.rounds
    if run.epsilon is not None:
        return ""
    idle = sum(report.trained == 0 for report in rounds)
    missing = [len(report.missing) for report in rounds if report.missing and report.trained]
    said = list(of_record(run))
    if any(report.missing or report.skipped for report in rounds):
        most = max(missing, default=0)
        said.insert(0, str(notice("card-idle", idle=idle, rounds=len(rounds), missing=len(missing), most=most)))
    return " ".join(said)


def figures(rows: ClientTable, *, shared: bool = False, private: bool = False) -> dict[str, Any]:
    """Figures of the error over some clients; null where a number does not exist.

    They are of the model that a client is served, its own if it has one, or, if `shared`, of the shared model. If `private`,
    those that rest on fewer than five clients are null, too: of fewer than five clients all, else those of the worst tenth.
    """
    rows, in_mean = rows.benign, rows.clients_in_mean
    weights = rows.size.double() if rows.split[0] == "train" else None
    errors = (rows.error, rows.loss) if shared else (rows.served_error, rows.served_loss)
    error, loss = (summarise(values, rows.size, weights) for values in errors)
    found = {
        "mean": error.mean, "percentile_90": error.percentiles[90], "worst_10": error.worst_10,
        "standard_deviation": error.standard_deviation, "mean_loss": loss.mean,
    }  # fmt: skip
    for name, values in (rows.metrics if shared else rows.served_metrics).items():
        found[f"mean_{name}"] = summarise_metric(values, rows.size, weights).mean
    if private and in_mean is None:
        few = found if len(rows) < FEWEST else TAIL if clients_in_tail(errors[0], weights) < FEWEST else ()
        found |= dict.fromkeys(few, math.nan)
    known: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in found.items()}
    known["mean_over"] = "clients" if weights is None else "examples"
    if in_mean is None:
        return {"clients": len(rows)} | known
    return {"clients": in_mean} | {name: value if name.startswith("mean") else None for name, value in known.items()}


def clients_in_tail(errors: Tensor, weights: Tensor | None) -> int:
    """How many clients the worst tenth rests on, by their errors (K,) and, where they do not count alike, weights (K,).

    >>> clients_in_tail(torch.arange(50.0), None), clients_in_tail(torch.arange(51.0), None)
    (5, 6)
    """
    weights = torch.ones(len(errors), dtype=torch.float64) if weights is None else weights
    ordered = weights[errors.argsort(descending=True)]
    before = ordered.cumsum(0) - ordered
    return int((before < 0.1 * ordered.sum() - 1e-9).sum())


def subgroups(run: RunRecord, rows: ClientTable, groups: Groups | None = None) -> list[dict[str, Any]]:
    """Figures of every group of `client_groups` that is shown."""
    rows, private = rows.benign, run.protects_clients
    shown = shown_groups(group_families(run, rows, groups), len(rows), private=private)
    return [{"group": name, **figures(rows.take(place), private=private)} for name, place in shown.items()]


def shown_groups(families: Iterable[dict[str, Tensor]], clients: int, *, private: bool) -> dict[str, Tensor]:
    """The groups that have enough clients; if `private`, only so many that the others are none or enough, too.

    The mean of all `clients` less those of the groups that are shown is the mean of the others.

    >>> north, south = torch.arange(6), torch.arange(6, 11)
    >>> [list(shown_groups([{"north": north, "south": south}], 15, private=private)) for private in (False, True)]
    [['north', 'south'], ['north']]
    """
    found: dict[str, Tensor] = {}
    for family in families:
        shown = {name: place for name, place in family.items() if len(place) >= FEWEST}
        while private and shown and 0 < clients - sum(map(len, shown.values())) < FEWEST:
            del shown[min(shown, key=lambda name: len(shown[name]))]
        found |= shown
    return found


def group_families(run: RunRecord, rows: ClientTable, groups: Groups | None = None) -> Iterator[dict[str, Tensor]]:
    """Groups by number of examples, by training, by known groups, by attributes: of one family no client is in two.

    Known are those that the caller gives and those of the risk (HierarchicalTilt, GroupDRO). The name of a group by number of
    examples has the smallest and the largest number, unless the run protects its clients.
    """
    parts: dict[str, Tensor] = {}
    if len(set(rows.size.tolist())) > 1 and len(rows) >= 3 * FEWEST:
        order = torch.argsort(rows.size, stable=True)
        for name, place in zip(("the fewest", "a middling number of", "the most"), order.tensor_split(3), strict=True):
            low, high = int(rows.size[place].min()), int(rows.size[place].max())
            sizes = "" if run.protects_clients else f" ({low} to {high})"
            parts[f"{'the third of ' * (not sizes)}clients with {name} examples{sizes}"] = place
        yield parts
    if 0 < int(rows.seen.sum()) < len(rows):
        yield {"clients of training": rows.seen.nonzero().flatten(), "unseen clients": (~rows.seen).nonzero().flatten()}
    for known in [*([] if groups is None else [checked_groups(groups)]), *_groups_of_risk(run)]:
        named: dict[str, list[int]] = {}
        for row, client in enumerate(rows.client):
            if not isinstance(known, Mapping) or client in known:  # a risk's groups may be of training clients alone
                named.setdefault(group_name(known, client), []).append(row)
        yield {f"group {name}": torch.tensor(places) for name, places in sorted(named.items())}
    for attribute, values in rows.attributes.items():
        yield {
            f"{attribute}: {value}": torch.tensor([row for row, own in enumerate(values) if own == value])
            for value in sorted(set(values))
        }


def _groups_of_risk(run: RunRecord) -> list[Groups]:
    """The groups that the risk of a run works with, also as a term of a mixture."""
    risk: Any = vars(run.algorithm).get("risk")  # an evaluation of a given model has none
    risks = [] if risk is None else [risk, *(inner for _, inner in vars(risk).get("terms", ()))]
    found = [vars(each).get("groups") for each in risks]
    return [each for each in found if isinstance(each, Mapping) or callable(each)]


def left_behind(rows: ClientTable, *, private: bool) -> dict[str, Any]:
    """Whom the model leaves behind: the worst tenth, how many clients err twice the mean, and, unless private, their names."""
    rows = rows.benign
    found = figures(rows, private=private)
    mean = found["mean"]
    behind = int((rows.served_error > 2 * mean).sum()) if mean is not None else None if private else 0
    about: dict[str, Any] = {
        "worst_tenth_mean": found["worst_10"], "clients_above_twice_the_mean": behind, "clients": len(rows),
        "worst_clients": None,
    }  # fmt: skip
    if rows.clients_in_mean is not None:
        unknown = dict.fromkeys(("worst_tenth_mean", "clients_above_twice_the_mean"))
        return {**about, **unknown, "clients": rows.clients_in_mean, "note": str(notice("means-only"))}
    if private:
        return {**about, "note": str(notice("not-named"))}
    named = [
        {"client": row["client"], "examples": row["size"], "error": _finite(row.get("personal_error"), row["error"])}
        for row in rows.worst(5)
    ]
    return {**about, "worst_clients": named}


def _finite(own: Any, shared: Any) -> float | None:
    """The error that a client sees: with its own model if it has one, else with the shared one."""
    for value in (own, shared):
        if isinstance(value, float) and math.isfinite(value):
            return value
    return None


def privacy_words(run: RunRecord, parameters: int = 0) -> str:
    """What the run promises about single clients, in words, and whether its noise drowned what clients sent."""
    if run.epsilon is not None:
        events = run.privacy.events if run.privacy is not None else ()
        clip = run.algorithm.traits.privacy.clip if isinstance(run.algorithm, Algorithm) else None  # else it is not recorded
        drowned = drowning_words(
            min((z for z, _, _ in events), default=0.0), parameters, run.clients_per_round or 0, clip or math.inf
        )
        noise = "" if run.privacy is None else run.privacy.noise
        drowned = "" if DROWNS in noise else drowned  # said once
        rows = run.privacy.rows if run.privacy is not None else ()
        server = [notice("card-server", shown=row.shown, assumes=row.assumes) for row in rows if row.observer == "server"]
        return " ".join(filter(None, map(str, [notice("card-private", spent=run.epsilon), *server, drowned, noise])))
    if run.algorithm.privacy is not None:
        return str(notice("card-sums", privacy=run.algorithm.privacy))
    return str(notice("card-none"))


def card_json(content: Mapping[str, Any]) -> bytes:
    """The card as a JSON file."""
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def card_markdown(content: Mapping[str, Any]) -> bytes:
    """The card as a Markdown file."""
    model, method, shared, judged = (content[key] for key in ("model", "method", "shared_metrics", "judged_on"))

    def number(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{100 * value:.1f} %" if content["in_percent"] else f"{value:.4g}"

    def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
        heads = [markdown_text(content["measured"]), "clients", *KEYS.values()]
        lines = [[markdown_text(name), str(row["clients"]), *(number(row[key]) for key in KEYS)] for name, row in rows.items()]
        return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---", *["---:"] * (len(heads) - 1)], *lines))

    named: dict[str, Any] = {}
    for split, row in content["metrics"].items():
        named[f"{split} clients, own models" if split in shared else f"{split} clients"] = row
        named |= {f"{split} clients, shared model": shared[split]} if split in shared else {}
    groups = table({row["group"]: row for row in content["subgroups"]}) if content["subgroups"] else ""
    title = f"### By group of {judged} clients{', own models' if judged in shared else ''}\n\n"
    clients = ", ".join(f"{count} {split}" for split, count in content["data"]["clients"].items())
    drawn = f"{method['rounds']} rounds of {method['clients_per_round']} clients, seed {method['seed']}."
    text = Template(Path(__file__).with_name("card.md").read_text(encoding="utf-8")).substitute(
        name=markdown_text(model["name"]),
        about="\n".join(f"- {key.replace('_', ' ')}: {markdown_text(value)}" for key, value in model.items() if key != "name"),
        data=f"{markdown_text(content['data']['name'])}: clients {clients}.",
        algorithm=method["algorithm"].replace("`", ""),
        training=f"{drawn} {method['took_part']}".rstrip(),
        figures=table(named),
        notes="\n\n".join(map(markdown_text, content["notes"])),
        groups=f"{title}{groups}" if groups else "",
        behind="\n\n".join(_behind_words(content["left_behind"], judged, content["error_is"], number)),
        privacy=markdown_text(content["privacy"]),
        made_with=", ".join(f"{name} {value}" for name, value in content["made_with"].items()) + ".",
    )
    return re.sub(r"\n{3,}", "\n\n", text).encode()


def _behind_words(behind: Mapping[str, Any], split: str, noun: str, number: Callable[[float | None], str]) -> Iterator[str]:
    """How the clients fare that fare worst, how many err twice the mean, and who they are."""
    above, few = behind["clients_above_twice_the_mean"], behind["worst_clients"]
    if above is not None:
        worst = number(behind["worst_tenth_mean"])
        yield str(notice("card-behind", split=split, clients=behind["clients"], noun=noun, worst=worst, above=above))
    if few:
        stars = ["*" * (row["examples"] < FEW_EXAMPLES) for row in few]
        pairs = zip(few, stars, strict=True)
        names = listed([f"{markdown_text(row['client'])} ({number(row['error'])}{star})" for row, star in pairs])
        notes = [notice("card-worst", names=names)]
        notes += [notice("few-examples", limit=FEW_EXAMPLES)] if any(stars) else []
        notes += [notice("picked", shown=len(few), all=behind["clients"])] if len(few) < behind["clients"] else []
        yield " ".join(map(str, notes))
    if "note" in behind:
        yield behind["note"]
