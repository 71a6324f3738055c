"""The commands `equipoise privacy epsilon`, `noise`, `ledger`, `observers` and `audit`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from equipoise.core.screen import say
from equipoise.core.words import printable

_HELP = "What privacy costs, how much noise a budget asks for, and whether a mechanism keeps its word."
app = typer.Typer(help=_HELP, no_args_is_help=True)

Delta = Annotated[float, Option(help="δ, the chance of failure that ε is stated for; below one over the clients.")]
Rounds = Annotated[int, Option(help="How many rounds the run has.")]
Rate = Annotated[float | None, Option(help="Poisson cohorts: each client's chance to be in a round. Default: everyone is.")]
Cohort = Annotated[int | None, Option(help="Cohorts of fixed size: clients in a round; goes with --population.")]
Population = Annotated[int | None, Option(help="Cohorts of fixed size: clients to draw them from.")]
MethodName = Annotated[str | None, Option(help="pld or rdp. Default: pld; rdp for cohorts of fixed size.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object; an infinite number is null.")]


def _print(values: dict[str, Any], words: str, as_json: bool) -> None:
    """Print a result in words, or as one JSON object."""
    if as_json:
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
        words = json.dumps(finite)
    say(*words.split("\n"))


def _rounded_up(multiplier: float) -> float:
    """The noise multiplier rounded up to five digits, so that the budget is kept."""
    unit = 10.0 ** (math.floor(math.log10(multiplier)) - 4)
    return float(f"{math.ceil(multiplier / unit) * unit:.5g}")


def _sampling_text(sampling: Any) -> tuple[str, str]:
    """How cohorts are drawn, and the unit of a noise multiplier."""
    from equipoise.privacy.releases import FixedSampling, PoissonSampling

    if isinstance(sampling, FixedSampling):
        return f"{sampling.cohort} of {sampling.population} clients in each round, without replacement", "2 × clip"
    if isinstance(sampling, PoissonSampling):
        return f"each client in a round with chance {sampling.rate:g}", "clip"
    return "every client in every round", "clip"


@app.command()
def epsilon(
    noise: Annotated[float, Option(help="Noise multiplier of the update: noise on the sum over its sensitivity.")],
    delta: Delta,
    rounds: Rounds,
    quantile_noise: Annotated[float | None, Option(help="Noise multiplier of a private quantile of each round.")] = None,
    sampling_rate: Rate = None,
    cohort: Cohort = None,
    population: Population = None,
    method: MethodName = None,
    as_json: Json = False,
) -> None:
    """What a run costs: ε for those who receive the models, and for one who knows the cohorts."""
    from dataclasses import asdict

    from equipoise.privacy.accounting import Accountant
    from equipoise.privacy.releases import CohortEvent, Release, sampling_of

    sampling = sampling_of(sampling_rate=sampling_rate, cohort=cohort, population=population)
    releases = [Release("update", noise)] + ([] if quantile_noise is None else [Release("quantile", quantile_noise)])
    event = CohortEvent(tuple(releases), sampling)
    spent = Accountant(event, delta, method=method, horizon=rounds).spent(rounds)  # type: ignore[arg-type]
    how, unit = _sampling_text(sampling)
    together = "" if quantile_noise is None else f" (update {noise:g} and quantile {quantile_noise:g} together)"
    words = f"{spent}\nNoise multiplier {event.multiplier:.5g}{together}: standard deviation over {unit}; {how}."
    _print({**asdict(spent), "noise_multiplier": event.multiplier}, words, as_json)


@app.command()
def noise(
    epsilon: Annotated[float, Option(help="The budget.")],
    delta: Delta,
    rounds: Rounds,
    sampling_rate: Rate = None,
    cohort: Cohort = None,
    population: Population = None,
    quantile_ratio: Annotated[
        float | None, Option(help="Share the budget with a private quantile that costs this many times the update.")
    ] = None,
    method: MethodName = None,
    as_json: Json = False,
) -> None:
    """The smallest noise multiplier that keeps a run within a budget."""
    from equipoise.privacy import accounting, releases

    if quantile_ratio is not None:
        releases.split(1.0, quantile_ratio)  # refuses a wrong ratio before the search
    sizes: dict[str, Any] = {"sampling_rate": sampling_rate, "cohort": cohort, "population": population}
    chosen: Any = method
    multiplier = _rounded_up(accounting.noise_for(epsilon, delta, rounds=rounds, method=chosen, **sizes))
    sampling = releases.sampling_of(**sizes)
    event = releases.CohortEvent((releases.Release("all", multiplier),), sampling)
    spent = accounting.Accountant(event, delta, method=chosen, horizon=rounds).spent(rounds)
    values: dict[str, Any] = {"noise_multiplier": multiplier}
    how, unit = _sampling_text(sampling)
    words = f"{multiplier:.5g}\nGaussian noise of standard deviation {multiplier:.5g} × {unit} on the sum of each round; {how}."
    if quantile_ratio is not None:
        quantile, update = (_rounded_up(z) for z in releases.split(multiplier, quantile_ratio))
        values |= {"quantile_noise_multiplier": quantile, "update_noise_multiplier": update}
        words += f"\nShared: multiplier {update:.5g} for the update and {quantile:.5g} for the quantile."
    values |= {"epsilon": spent.epsilon, "delta": delta, "adjacency": spent.adjacency, "method": spent.method, "rounds": rounds}
    _print(values, f"{words}\n{spent}", as_json)


@app.command()
def ledger(
    folder: Annotated[Path, Argument(metavar="DIR", help="A run, a study, or any folder with ledgers below it; or one file.")],
    delta: Annotated[
        float | None, Option(help="δ that ε is stated for. Default: the smallest that the runs name, or 1e-5.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What all runs in a folder have released, and what they cost together, by data set. Exact models have no ε."""
    from dataclasses import replace

    from equipoise.experiment.open_runs import find_open_runs, group_data
    from equipoise.privacy.ledger import find_ledgers, read_entries
    from equipoise.privacy.ledger_report import entries_below, runs_without_ledger, summarise_ledgers
    from equipoise.privacy.releases import check_delta

    if delta is not None:
        check_delta(delta)
    places = {path.parent for path in find_ledgers(folder)}

    def name(path: Path) -> str:
        return str(path.relative_to(folder)) if path != folder else str(path)

    plain = [run for run in find_open_runs(folder) if Path(run.folder) not in places]
    groups = group_data(folder)  # federations that share the data of a node
    by_data: dict[str, dict[str, int]] = {}
    for run in plain:
        if run.data and run.rounds:
            by_data.setdefault(groups.get(run.data, run.data), {})[name(Path(run.folder))] = run.rounds
    entries = entries_below(folder) if places or not plain else []
    entries = [replace(entry, data=groups.get(entry.data, entry.data)) for entry in entries]
    alone = [path for path in find_ledgers(folder) if (path.parent / "config.toml").exists()]  # and not that of a study
    folders = {entry.run: name(path.parent) for path in alone if path != folder for entry in read_entries(path)}
    found = summarise_ledgers(entries, delta, by_data, folders)
    words, others = "\n\n".join(map(str, found)), [str(run) for run in runs_without_ledger(folder)]
    unknown = [run.folder for run in plain if not run.data]
    if unknown:
        words += f"\n\nWithout ε, on data that their folder does not tell (exact models): {', '.join(map(printable, unknown))}"
    if others:
        listed = ", ".join(map(printable, others))
        words += f"\n\nNot counted, because their ledger is not here (train(…, ledger=PATH) writes one): {listed}"
    values = {"data": [data.plain() for data in found], "without_ledger": others, "exact_on_unknown_data": unknown}
    _print(values, words.strip(), as_json)


@app.command()
def observers(
    folder: Annotated[Path, Argument(metavar="RUN", help="The folder of a finished run.")], as_json: Json = False
) -> None:
    """ε of a finished run by observer: the public, a node, the server."""
    from equipoise.errors import ConfigError
    from equipoise.experiment.folder import read_record

    table = read_record(folder).privacy
    if table is None:
        raise ConfigError(f"The run in {folder} has no table of observers: it is not private, or of version 0.1.")
    _print(table.plain(), str(table), as_json)


@app.command()
def audit(
    folder: Annotated[
        Path | None, Argument(metavar="[RUN]", help="The folder of a run: its own configuration is audited.")
    ] = None,
    noise: Annotated[float | None, Option(help="Without RUN: the noise multiplier that a sum really has.")] = None,
    delta: Annotated[float | None, Option(help="Without RUN: δ that ε is stated for.")] = None,
    epsilon: Annotated[float | None, Option(help="The ε that is claimed. Default: the accountant's.")] = None,
    rounds: Annotated[
        int | None, Option(help="How many rounds are attacked. Default: 1; of a run as many as it takes.")
    ] = None,
    sampling_rate: Annotated[float, Option(help="Without RUN: the chance of the canary to take part in a round.")] = 1.0,
    runs: Annotated[int | None, Option(help="How often with the canary, and without. Default: 100,000; of a run 2000.")] = None,
    noise_factor: Annotated[float, Option(help="Of a run: what if it had so much of the noise that it claims?")] = 1.0,
    confidence: Annotated[float, Option(help="How sure the lower bound is.")] = 0.95,
    seed: Annotated[int, Option(help="Seed of the runs.")] = 0,
    as_json: Json = False,
) -> None:
    """Attack a run's own configuration, or a clipped noisy sum, with canaries; exit code 1 if it leaks more than is claimed.

    Of a run each attack is repeated with half of the noise; exit code 3 if that is not found out, so that nothing was shown.
    """
    from dataclasses import asdict

    from equipoise.errors import require
    from equipoise.privacy.accounting import epsilon_of
    from equipoise.privacy.audit import audit as run_audit
    from equipoise.privacy.audit import gaussian_sum_scores

    require(epsilon is None or epsilon >= 0, "epsilon", "must be at least 0", epsilon)
    if folder is not None:
        require(epsilon is None, "epsilon", "is the run's own, which its accountant says", epsilon, "Leave --epsilon out.")
        options = {"audited": rounds, "trials": runs or 2000, "noise_factor": noise_factor}
        values, words = _audit_folder(folder, seed=seed, confidence=confidence, **options)
        refuted = values["refuted"]
    else:
        require(noise is not None and delta is not None, "noise", "and delta must be given, or the folder of a run", None)
        noise, delta, rounds = noise or 0.0, delta or 0.0, rounds or 1
        claimed = epsilon_of([(noise, sampling_rate, rounds)], delta) if epsilon is None else epsilon
        scores = gaussian_sum_scores(noise_multiplier=noise, sampling_rate=sampling_rate, rounds=rounds)
        found = run_audit(scores, delta=delta, runs=runs or 100_000, seed=seed, confidence=confidence)
        refuted = found.exceeds(claimed)
        values = {**asdict(found), "claimed": claimed, "refuted": refuted, "conclusive": True}
        words = f"{found}\n{'REFUTED: it leaks more than' if refuted else 'not refuted: nothing beyond'} ε = {claimed:.4g}."
    _print(values, words, as_json)
    if refuted or not values["conclusive"]:
        raise typer.Exit(1 if refuted else 3)


def _audit_folder(folder: Path, **options: Any) -> tuple[dict[str, Any], str]:
    """The audits of a run's configuration, by observer: as values, and in words."""
    from dataclasses import asdict

    from equipoise.algorithm import Algorithm
    from equipoise.errors import ConfigError
    from equipoise.experiment.folder import count_training_clients, read_record
    from equipoise.privacy.run_audit import audit_algorithm

    record = read_record(folder)
    if not isinstance(record.algorithm, Algorithm) or not record.algorithm.private:
        raise ConfigError(f"The run in {folder} cannot be audited: it is not private, or has parts that are not recorded.")
    clients = count_training_clients(folder, record)
    audits = audit_algorithm(
        record.algorithm, clients=clients, clients_per_round=record.clients_per_round, rounds=record.rounds, **options
    )
    by_observer = [{**asdict(each.result), **_flags(each)} for each in audits]
    refuted, conclusive = any(each["refuted"] for each in by_observer), all(each["conclusive"] for each in by_observer)
    whole = {"refuted": refuted, "conclusive": conclusive, "observers": by_observer}
    return by_observer[0] if len(by_observer) == 1 else whole, "\n".join(map(str, audits))


def _flags(audit: Any) -> dict[str, Any]:
    return {name: getattr(audit, name) for name in ("observer", "rounds", "conclusive", "refuted")}
