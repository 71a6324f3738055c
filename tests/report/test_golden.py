"""Pages, tables and texts as golden files, which a person reviews as a diff: python tests/report/test_golden.py writes them."""

import difflib
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.export import model_card
from equipoise.report.notices import entries

GOLDEN = Path(__file__).with_name("golden")
BLOCKS = {"h1", "h2", "h3", "p", "tr", "figcaption", "dt", "dd", "caption", "summary"}


class Text(HTMLParser):
    """What a reader sees of a page, a line for each block, without scripts and numbers of the machine."""

    def __init__(self, page):
        super().__init__()
        self.lines, self._hidden = [""], 0
        self.feed(page)
        lines = (" ".join(line.split()) for line in self.lines)
        self.text = "\n".join(line for line in lines if line) + "\n"

    def handle_starttag(self, tag, attrs):
        self._hidden += tag in ("script", "style", "head")
        self.lines += [{"h2": "## ", "h1": "# "}.get(tag, "")] if tag in BLOCKS else []
        self.lines[-1] += " | " if tag in ("td", "th") else ""

    def handle_endtag(self, tag):
        self._hidden -= tag in ("script", "style", "head")

    def handle_data(self, data):
        self.lines[-1] += "" if self._hidden else data


def same(number, digit):
    """Errors by hand, so that no processor changes a digit: 40 test clients, the more examples the smaller the error."""
    return [round(0.05 + 0.012 * k + 0.01 * ((7 * k + number) % 5) + digit, 2) for k in range(40)]


def run_of(name, seed, digit, **changes):
    sizes = [100 - 2 * k for k in range(40)]
    error = torch.tensor([round(e * n) / n for e, n in zip(same(seed, digit), sizes, strict=True)], dtype=torch.float64)
    table = eq.ClientTable(
        tuple(f"client {k}" for k in range(40)), ("test",) * 40, torch.zeros(40, dtype=torch.bool), torch.tensor(sizes),
        loss=2 * error, error=error, trivial_error=torch.full_like(error, 0.5), trivial_answer="most frequent class",
        attributes={"country": ("AT", "DE") * 20},
    )  # fmt: skip
    data = eq.data.label_shift(train_clients=4, validation_clients=0, test_clients=2, examples=10)
    risk = eq.risk.Superquantile(tail=0.5) if name == "tail" else eq.risk.Mean()
    run = eq.train(
        eq.models.Softmax(20, 10), data, eq.Algorithm(risk=risk), rounds=2, clients_per_round=2, seed=seed, progress=False
    )
    return replace(run, name=name, clients=table, seconds=1.0, error_name="0-1 error", **changes)


def made():
    runs = {"FedAvg": [run_of("FedAvg", seed, 0.0) for seed in range(3)]}
    runs["tail"] = [run_of("tail", seed, -0.03 - 0.01 * seed) for seed in range(3)]
    comparison = eq.Comparison(runs)
    one = run_of("run", 0, 0.0)
    small = replace(one, clients=one.clients.take(torch.arange(33, 40)))
    card = model_card.card(small, about={"class": "Softmax"})
    return {
        "one.txt": Text(page_of(one)).text,
        "compare.txt": Text(page_of(comparison)).text,
        "summaries.txt": "\n\n".join(map(str, (one, one.clients.worst(3), small.summary(), comparison))) + "\n",
        "tables.txt": f"{comparison.to_markdown(baseline='FedAvg')}\n\n{comparison.to_latex(percent=True)}\n",
        "card.md": re.sub(r"equipoise .*", "…", model_card.card_markdown({**card, "made_with": {"equipoise": ""}}).decode()),
    }


def page_of(found):
    page = found.report(GOLDEN.parent / "golden.html").read_text(encoding="utf-8")
    (GOLDEN.parent / "golden.html").unlink()
    return re.sub(r"equipoise [\w.]+, torch [\w.+]+", "…", re.sub(r"\d{4}-\d\d-\d\d", "…", page))


@pytest.fixture(scope="module")
def texts():
    return made()


@pytest.mark.parametrize("name", ["one.txt", "compare.txt", "summaries.txt", "tables.txt", "card.md"])
def test_what_a_person_reads_is_as_reviewed(texts, name):
    reviewed = (GOLDEN / name).read_text(encoding="utf-8").splitlines()
    changes = [*difflib.unified_diff(reviewed, texts[name].splitlines(), "reviewed", "now", lineterm="", n=0)]
    assert not changes, "\n".join(["Review with git diff after: python tests/report/test_golden.py", *changes])


def test_every_notice_is_short_and_used():
    source = "".join(path.read_text(encoding="utf-8") for path in (Path(eq.__file__).parent).rglob("*.py"))
    for code, entry in entries().items():
        assert entry.get("level", "info") in ("info", "notice", "warning"), code
        assert len(entry["text"].split()) <= 36, code
        family = code.partition("-")[0]
        assert f'"{code}"' in source or f'f"{family}-' in source, f"nothing says {code!r}"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, text in made().items():
        (GOLDEN / name).write_text(text, encoding="utf-8")
    sys.stdout.write(f"Written: {GOLDEN}\n")
