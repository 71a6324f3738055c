"""The sections of a page that only some runs have: attacks, updates that were left out, the network, and privacy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from equipoise.absent_clients import absent_words
from equipoise.few_clients import few_clients_words
from equipoise.privacy.observer_table import composed_words
from equipoise.report.data.over_seeds import malicious_clients, without_own_models
from equipoise.report.data.results_by_method import MethodResults, Study
from equipoise.report.text.phrases import BACKDOOR, attack_words, listed, own_worse_words, untrained_words
from equipoise.report.text.tables import backdoor_table, malicious_table, nonbreaking, rejected_table, swatch
from equipoise.runs.standing_out import of_record
from equipoise.small_clients import small_clients_words

if TYPE_CHECKING:
    from equipoise.privacy.accounting import Spent
    from equipoise.run_record import RunRecord

MALICIOUS_NAMES = 8  # malicious clients named
NOT_COVERED = "ε covers released models; metrics of training clients, choices by them, logs and reports are not covered by ε."


def header_note(study: Study) -> str:
    """A note on a sample, malicious clients, own models, few and small clients, for below the headline; empty without any."""
    sentences = [f"Figures are of {study.sample}."] if study.sample else []
    if study.attacked:
        end = ", and figures are of the benign ones" if study.judged.benign else ""
        sentences.append(f"{attack_words(study.runs)}{end}.")
    if study.personalised:
        under = f"Under {listed([method.name for method in study.personalised])}, each" if len(study.methods) > 1 else "Each"
        where = " where it has one" if any(method.partly_personalised for method in study.personalised) else ""
        sentences.append(f"{under} client is served a model of its own{where}.")
    lacking = [method.name for method in study.methods if without_own_models(method.runs)]
    if lacking:
        under = f" under {listed(lacking)}" if len(study.methods) > 1 else ""
        sentences.append(
            f"These {study.judged.split} clients took no part in training and have no models of their own{under}: figures "
            "are of the shared model. Split examples inside clients (data.split_examples) to judge personal models."
        )
    if worse := own_worse_words({method.name: method.runs for method in study.methods}):
        sentences.append(worse)
    if untrained := untrained_words({method.name: method.runs for method in study.methods}):
        sentences.append(untrained)
    few = (small_clients_words(study.runs, hint=""), few_clients_words(study.runs))
    sentences += filter(None, (absent_note(study), study.contradictions, *few))
    return " ".join(sentences)


def absent_note(study: Study) -> str:
    """Sentences on clients that the figures leave out because they were not evaluated; empty without any.

    Of a run that protects clients the number alone: it does not say who took part.
    """
    split, several = study.judged.split, len(study.runs) > 1
    sentences = []
    for method in study.methods:
        for run in method.runs:
            words = absent_words(run.clients, split, named=not run.protects_clients)
            sentences += [f"{method.name}, seed {run.seed}: {words}" if several else words] if words else []
    if len({tuple(sorted(run.clients.not_evaluated.get(split, ()))) for run in study.runs}) > 1:
        sentences.append("Runs that leave out different clients do not compare: differences may come from the clients.")
    return " ".join(sentences)


def attack_section(study: Study) -> Iterator[str]:
    """The number of malicious clients, their names, and their errors; nothing without an attack."""
    if not study.attacked:
        return
    sets = {malicious_clients(run) for run in study.runs}
    names = ", not the same in all runs" if len(sets) > 1 else ""
    if not names and study.names_clients:
        names = f": {listed(next(iter(sets)), MALICIOUS_NAMES)}"
    separate = any("malicious_mean" in method.figures for method in study.methods)
    if separate:
        rest = "All other figures and tables leave them out, unless they say otherwise."
        if study.judged.weighted:
            rest += " Their own examples may be poisoned, so that a large error on them is no bad sign."
        else:
            rest += f" Their {study.judged.split} examples are not poisoned."
    elif study.judged.unseen:
        rest = f"None of them is among the {study.judged}, of which figures and tables speak."
    else:
        rest = "No other clients are there to be judged on."
    yield '<section aria-labelledby="attack"><h2 id="attack">Under attack</h2>'
    yield f'<p class="note">{escape(nonbreaking(f"{attack_words(study.runs)}{names}. {rest}"))}</p>'
    if separate:
        yield from malicious_table(study)
    if all(BACKDOOR in run.clients.metrics for run in study.runs):
        yield from backdoor_table(study)
    yield "</section>"


def rejected_section(study: Study) -> Iterator[str]:
    """The clients whose updates were left out, and the rounds; nothing if none was."""
    if not any(report.rejected for run in study.runs for report in run.history.rounds):
        return
    yield '<section aria-labelledby="rejected"><h2 id="rejected">Updates left out</h2>'
    yield from rejected_table(study)
    yield "</section>"


def network_section(study: Study) -> Iterator[str]:
    """Bytes over the network and failures, by node; nothing for simulations.

    Of a run that protects clients the totals alone: who took part in which rounds is the operator's to know.
    """
    federated = [(method, run) for method in study.methods for run in method.runs if _has_traffic(run)]
    if not federated:
        return
    yield '<section aria-labelledby="network"><h2 id="network">Over the network</h2>'
    yield '<p class="note">Messages between the server and the nodes, by the server\'s count; evaluation is not counted.</p>'
    yield '<div class="scroll"><table id="traffic"><thead><tr><th>run</th><th>node</th><th>sent to it</th><th>received</th>'
    yield "<th>rounds it failed in</th><th>the last reason</th></tr></thead><tbody>"
    for method, run in federated:
        sent, received, failed, reason = _by_node(run)
        rounds = max(1, len(run.history.rounds))
        totals = sum(r.bytes_sent for r in run.history.rounds), sum(r.bytes_received for r in run.history.rounds)
        label = escape(f"{method.name}, seed {run.seed}")
        cells = "".join(f"<td>{_bytes_text(total)}</td>" for total in totals)
        each = " / ".join(_bytes_text(total / rounds) for total in totals)
        yield f"<tr><th>{label}</th><td>all</td>{cells}<td colspan=2>{each} a round</td></tr>"
        for node in sorted(set(sent) | set(failed)) if not run.protects_clients else ():
            texts = (node, _bytes_text(sent[node]), _bytes_text(received[node]), str(failed[node]), reason.get(node, ""))
            yield "<tr><th></th>" + "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>"
    yield "</tbody></table></div>"
    for method, run in federated:
        if skipped := skipped_words(run):
            yield f'<p class="note skipped">{escape(f"{method.name}, seed {run.seed}: {skipped}")}</p>'
        if stood_out := " ".join(of_record(run)):
            yield f'<p class="note stood-out">{escape(f"{method.name}, seed {run.seed}: {stood_out}")}</p>'
    if any(run.protects_clients for _, run in federated):
        yield '<p class="note" id="operator">Of a run that protects clients, what each node sent and when it failed is not '
        yield "shown: that would tell who took part. Its operator finds it in <code>rounds.jsonl</code> of the run folder.</p>"
    yield "</section>"


def _has_traffic(run: RunRecord) -> bool:
    """Whether clients were on other machines."""
    return any(report.bytes_sent or report.missing for report in run.history.rounds)


def skipped_words(run: RunRecord) -> str:
    """Which rounds of a federation were skipped, and why; empty if none was."""
    reasons: dict[str, list[str]] = {}
    for report in run.history.rounds:
        if report.skipped:
            reasons.setdefault(report.skipped, []).append(str(report.round + 1))
    listed = (f"round{'s' * (len(rounds) > 1)} {', '.join(rounds)} ({why})" for why, rounds in reasons.items())
    return f"skipped, so that the model stayed as it was: {'; '.join(listed)}." if reasons else ""


def _by_node(run: RunRecord) -> tuple[Counter[str], Counter[str], Counter[str], dict[str, str]]:
    """By node: bytes sent, bytes received, the number of rounds in which it failed, and the last reason."""
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    reason: dict[str, str] = {}
    for report in run.history.rounds:
        for node, (to, back) in report.bytes_by_client.items():
            sent[node] += to
            received[node] += back
        failed.update(report.missing.keys())
        reason |= report.missing
    return sent, received, failed, reason


def _bytes_text(count: float) -> str:
    """A number of bytes with its unit, e.g. 1.2 kB or 3.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def is_private(study: Study) -> bool:
    """Whether the runs of any method have spent a privacy budget."""
    return any(_spent(method) for method in study.methods)


def privacy_section(study: Study, curve: Iterator[str]) -> Iterator[str]:
    """ε of each method in words, what it does not cover, and its curve over the rounds; nothing without privacy."""
    drawn = list(curve)
    if not is_private(study) and not drawn:
        return
    yield '<section aria-labelledby="privacy"><h2 id="privacy">Privacy spent</h2>'
    if len(study.methods) == 1:
        yield f'<p id="epsilon">{escape(privacy_words(study.methods[0]))}</p>'
    else:
        yield '<dl id="epsilon">'
        for index, method in enumerate(study.methods):
            yield f"<dt>{swatch(index)}{escape(method.name)}</dt><dd>{escape(privacy_words(method))}</dd>"
        yield "</dl>"
    yield from _observer_tables(study)
    if together := composed_words(run.privacy for run in study.runs):
        yield f'<p id="composed">{escape(together)}</p>'
    noise = {method.name: words for method in study.methods for run in method.runs for words in [_noise(run)] if words}
    for name, words in noise.items():
        yield f'<p class="noise">{escape(words if len(study.methods) == 1 else f"{name}: {words}")}</p>'
    own = " Clients' own models are not covered either: they are for the client alone." if study.personalised else ""
    yield f'<p class="note">{NOT_COVERED}{own}</p>'
    yield from drawn
    yield "</section>"


def _noise(run: RunRecord) -> str:
    """Sentences on a private model that is mostly noise; empty if it is not."""
    return "" if run.privacy is None else run.privacy.noise


def _observer_tables(study: Study) -> Iterator[str]:
    """For each private method one ε per observer: of the run that has spent the most."""
    for index, method in enumerate(study.methods):
        tables = [run.privacy for run in method.runs if run.privacy is not None and run.privacy.delta is not None]
        if not tables:
            continue
        table = max(tables, key=lambda each: each["public"].epsilon or 0.0)
        named = f"{swatch(index)}{escape(method.name)}: " if len(study.methods) > 1 else ""
        yield f'<div class="scroll"><table class="observers"><caption>{named}ε by observer, at δ = {table.delta:.4g}'
        heads = "".join(f"<th>{head}</th>" for head in ("observer", "ε", "neighbours differ by", "assuming"))
        yield f"</caption><thead><tr>{heads}</tr></thead><tbody>"
        for row in table.rows:
            cells = "".join(f"<td>{escape(text)}</td>" for text in (row.shown, row.adjacency, row.assumes))
            yield f"<tr><th>{escape(row.observer)}</th>{cells}</tr>"
        yield "</tbody></table></div>"


def _spent(method: MethodResults) -> list[Spent]:
    """The privacy that each run of a method has spent; empty unless all runs are private."""
    spent = [run.epsilon for run in method.runs if run.epsilon is not None]
    return spent if len(spent) == len(method.runs) else []


def privacy_words(method: MethodResults) -> str:
    """The privacy that a method has spent, in a sentence; if seeds differ, the largest ε."""
    spent = _spent(method)
    if not spent:
        return "No privacy is promised."
    most = max(spent, key=lambda each: (each.epsilon, each.epsilon_server))
    text = str(most).rstrip()
    text += "" if text.endswith(".") else "."
    return f"{text} This is the most of {len(spent)} seeds." if len(set(map(str, spent))) > 1 else text
