"""What a page says of attacks, of updates that were left out, of the network and of privacy, where a run has any of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from equipoise.report.data.over_seeds import malicious_clients, without_own_models
from equipoise.report.data.results_by_method import MethodResults, Study
from equipoise.report.text.phrases import attack_words, listed
from equipoise.report.text.tables import bound, malicious_table, rejected_table, swatch

if TYPE_CHECKING:
    from equipoise.result import RunRecord

NAMED = 8  # of the malicious clients
NOT_COVERED = "ε covers the released models; metrics of training clients, logs and this report are not covered by ε."


def header_note(study: Study) -> str:
    """Below the headline: whose models and which clients the page speaks of. Empty for runs without attack or own models."""
    found = []
    if study.attacked:
        end = ", and figures are of the benign ones" if study.crowd.benign else ""
        found.append(f"{attack_words(study.runs)}{end}.")
    if study.own:
        under = f"Under {listed([method.name for method in study.own])}, each" if len(study.methods) > 1 else "Each"
        where = " where it has one" if any(method.partly_own for method in study.own) else ""
        found.append(f"{under} client is served a model of its own{where}.")
    lacking = [method.name for method in study.methods if without_own_models(method.runs)]
    if lacking:
        under = f" under {listed(lacking)}" if len(study.methods) > 1 else ""
        found.append(
            f"These {study.crowd.split} clients took no part in training and have no models of their own{under}: figures "
            "are of the shared model. Split examples inside clients (data.split_examples) to judge personal models."
        )
    return " ".join(found)


def attack_section(study: Study) -> Iterator[str]:
    """How many clients are malicious, who they are, and how they fare; nothing without an attack."""
    if not study.attacked:
        return
    sets = {malicious_clients(run) for run in study.runs}
    names = f": {listed(next(iter(sets)), NAMED)}" if len(sets) == 1 else ", not the same in all runs"
    apart = any("malicious_mean" in method.figures for method in study.methods)
    if apart:
        rest = "All other figures and tables leave them out, unless they say otherwise."
        if study.crowd.weighted:
            rest += " Their own examples may be poisoned, so that a large error on them is no bad sign."
        else:
            rest += f" Their {study.crowd.split} examples are not poisoned."
    elif study.crowd.unseen:
        rest = f"None of them is among the {study.crowd}, of which figures and tables speak."
    else:
        rest = "No other clients are there to be judged on."
    yield '<section aria-labelledby="attack"><h2 id="attack">Under attack</h2>'
    yield f'<p class="note">{escape(bound(f"{attack_words(study.runs)}{names}. {rest}"))}</p>'
    if apart:
        yield from malicious_table(study)
    yield "</section>"


def rejected_section(study: Study) -> Iterator[str]:
    """Whose updates were left out, and when; nothing if none was."""
    if not any(report.rejected for run in study.runs for report in run.history.rounds):
        return
    yield '<section aria-labelledby="rejected"><h2 id="rejected">Updates left out</h2>'
    yield from rejected_table(study)
    yield "</section>"


def network_section(study: Study) -> Iterator[str]:
    """What went over the network, by node, and which nodes failed; nothing for simulations."""
    federated = [(method, run) for method in study.methods for run in method.runs if any(_traffic(run))]
    if not federated:
        return
    yield '<section aria-labelledby="network"><h2 id="network">Over the network</h2>'
    yield '<p class="note">Messages between the server and the nodes, by the server\'s count; evaluation is not counted.</p>'
    yield '<div class="scroll"><table id="traffic"><thead><tr><th>run</th><th>node</th><th>sent to it</th><th>received</th>'
    yield "<th>rounds it failed in</th><th>the last reason</th></tr></thead><tbody>"
    for method, run in federated:
        sent, received, failed, reason = _by_node(run)
        rounds = max(1, len(run.history.rounds))
        to, back = sum(r.bytes_sent for r in run.history.rounds), sum(r.bytes_received for r in run.history.rounds)
        label = escape(f"{method.name}, seed {run.seed}")
        each = f"{_size(to / rounds)} / {_size(back / rounds)} a round"
        yield f"<tr><th>{label}</th><td>all</td><td>{_size(to)}</td><td>{_size(back)}</td><td colspan=2>{each}</td></tr>"
        for node in sorted(set(sent) | set(failed)):
            cells = (
                node,
                _size(sent.get(node, 0)),
                _size(received.get(node, 0)),
                str(failed.get(node, 0)),
                reason.get(node, ""),
            )
            yield "<tr><th></th>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div></section>"


def _traffic(run: RunRecord) -> Iterator[bool]:
    return (bool(report.bytes_sent or report.missing) for report in run.history.rounds)


def _by_node(run: RunRecord) -> tuple[Counter[str], Counter[str], Counter[str], dict[str, str]]:
    """Bytes sent to and received from each node, in how many rounds it failed, and the last reason."""
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


def _size(count: float) -> str:
    """Bytes in words: 1.2 kB, 3.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def is_private(study: Study) -> bool:
    """Whether any run says what privacy it has spent."""
    return any(_spent(method) for method in study.methods)


def privacy_section(study: Study, curve: Iterator[str]) -> Iterator[str]:
    """ε of each method in words, what it does not cover, and its curve over the rounds; nothing for runs without any."""
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
    own = " Clients' own models are not covered either: they are for the client alone." if study.own else ""
    yield f'<p class="note">{NOT_COVERED}{own}</p>'
    yield from drawn
    yield "</section>"


def _spent(method: MethodResults) -> list[object]:
    """What each run has spent; empty unless all of them say so."""
    found = [getattr(run, "epsilon", None) for run in method.runs]
    return found if all(spent is not None for spent in found) else []


def privacy_words(method: MethodResults) -> str:
    """What a method has spent; of seeds that differ, the most."""
    spent = _spent(method)
    if not spent:
        return "No privacy is promised."
    most = max(spent, key=lambda each: [float(getattr(each, name, 0.0)) for name in ("epsilon", "epsilon_server")])
    text = str(most).rstrip()
    text += "" if text.endswith(".") else "."
    return f"{text} This is the most of {len(spent)} seeds." if len(set(map(str, spent))) > 1 else text
