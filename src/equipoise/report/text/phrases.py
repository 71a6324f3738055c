"""Phrases that the report, tables on the console and error messages share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from equipoise.client_table import count_worse_own_models
from equipoise.report.data.over_seeds import (
    Spread,
    has_untrained_layers,
    malicious_clients,
    training_clients,
    without_own_models,
)

if TYPE_CHECKING:
    from equipoise.run_record import RunRecord

SHARED = "  shared model"  # the row below a method whose clients are served their own models
BACKDOOR = "backdoor_success"  # the column of the rate at which a backdoor works
UNATTACKED = (
    "A mark alone can change predictions: compare this rate with that of a model that nobody attacked, "
    "attacks.Backdoor(…, share=0)."
)
INTERVAL = "  95 % interval"  # the row below a method that was judged on a sample of clients


def count_words(numbers: Iterable[int]) -> str:
    """A number, or the range of numbers that differ from run to run.

    >>> count_words([8, 8]), count_words([7, 1000, 8])
    ('8', '7 to 1,000')
    """
    ordered = sorted(numbers)
    return f"{ordered[0]:,}" if ordered[0] == ordered[-1] else f"{ordered[0]:,} to {ordered[-1]:,}"


def capital(text: str) -> str:
    """The text with a capital letter; the others stay as they are, and so does a first word that is a name in code.

    >>> capital("squared error"), capital("pinball_error of price")
    ('Squared error', 'pinball_error of price')
    """
    return text if "_" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def minus(text: str) -> str:
    """A number with the sign − in place of a hyphen."""
    return f"−{text[1:]}" if text.startswith("-") else text


def plural(noun: str, count: float) -> str:
    """The noun for a number of things: "clients" for more than one, else "client"."""
    return f"{noun}s" if count > 1 else noun


def listed(names: Sequence[str], most: int | None = None) -> str:
    """Names in a sentence; of many, the first ones.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(["a", "b", "c", "d"], most=2)
    ('a', 'a, b and c', 'a, b and 2 others')
    """
    if most is not None and len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most:,} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def attack_words(runs: Sequence[RunRecord]) -> str:
    """A clause that says how many training clients are malicious; empty if none is."""
    bad = [len(malicious_clients(run)) for run in runs]
    if not any(bad):
        return ""
    total = count_words(training_clients(run) for run in runs)
    total += " evaluated" if any(run.sampled is not None for run in runs) else ""
    return f"{count_words(bad)} of {total} training clients {'are' if max(bad) > 1 else 'is'} malicious"


def sample_words(runs: Sequence[RunRecord]) -> str:
    """How many clients the runs are judged on if these are a sample, e.g. "10 of 500 clients, drawn at random"; else empty."""
    sizes = [run.sample_of(run.judged_on) for run in runs]
    if not any(sizes):
        return ""
    counts = [size or (len(run.clients.where(run.judged_on)),) * 2 for run, size in zip(runs, sizes, strict=True)]
    evaluated, every = (count_words(numbers) for numbers in zip(*counts, strict=True))
    return f"{evaluated} of {every} clients, drawn at random"


def untrained_words(methods: Mapping[str, Sequence[RunRecord]], shown: Collection[str] | None = None) -> str:
    """A sentence on shared models with layers that were never trained; empty if no method keeps layers with its clients.

    `shown` are the methods whose shared model has figures in view; None: all.
    """
    names = [name for name, runs in methods.items() if (shown is None or name in shown) and has_untrained_layers(runs)]
    if not names:
        return ""
    under = f"Under {listed(names)}, the" if len(methods) > 1 else "The"
    return (
        f"{under} layers that clients keep were never trained in the shared model: they are as they began, and the "
        "figures of the shared model mean little without finetuning."
    )


def own_worse_words(methods: Mapping[str, Sequence[RunRecord]]) -> str:
    """A sentence on the clients whose own models are worse for them than the shared one, by method; empty if there are none."""
    found = []
    for name, runs in methods.items():
        counts = [count_worse_own_models(run.clients, run.judged_on) for run in runs]
        if any(worse for worse, _ in counts):
            worse, known = (count_words(numbers) for numbers in zip(*counts, strict=True))
            seeds = " (over seeds)" if len({worse for worse, _ in counts}) > 1 else ""
            under = f"Under {name}, own" if len(methods) > 1 else "Own"
            found.append(f"{under} models have a larger error than the shared model for {worse} of {known} clients{seeds}.")
    return " ".join(found)


def remarks(
    methods: Mapping[str, Sequence[RunRecord]], table: Mapping[str, Mapping[str, Spread]], write: Callable[[float], str]
) -> str:
    """One line under a table of methods: whose models it judges, which clients it leaves out; empty if nothing is special."""
    own = [name for name, row in table.items() if "shared_mean" in row]
    sentences = []
    if own:
        below = "the row below it is" if len(own) == 1 else "the rows below them are"
        sentences.append(f"Under {listed(own)}, clients are served their own models; {below} of the shared model.")
    if lacking := [name for name, runs in methods.items() if without_own_models(runs)]:
        sentences.append(f"Under {listed(lacking)}, these clients have no models of their own, and are served the shared one.")
    if worse := own_worse_words(methods):
        sentences.append(worse)
    if untrained := untrained_words(methods, {*own, *lacking}):
        sentences.append(untrained)
    if attack := attack_words([run for runs in methods.values() for run in runs]):
        theirs = [f"{write(row['malicious_mean'].mean)} under {name}" for name, row in table.items() if "malicious_mean" in row]
        left_out = f", and left out above; their mean error: {', '.join(theirs)}" if theirs else ""
        sentences.append(f"{attack}{left_out}.")
    rejected = {name: sum(len(r.rejected) for run in runs for r in run.history.rounds) for name, runs in methods.items()}
    if any(rejected.values()):
        each = ", ".join(f"{name} {count:,}" for name, count in rejected.items() if count)
        sentences.append(f"Updates left out because they were not finite or absurdly large: {each}.")
    return " ".join(sentences)
