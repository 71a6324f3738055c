"""The error of the private quantile against ε and the bits of the sum (Pillutla et al. 2023, section 7.6, Figure 5).

    python benchmarks/private_quantile.py [--runs 10] [--out docs/images/private_quantile.png]

n = 256 losses, uniform on [0, 10] or χ²(4) clipped to it; each client's noise has σ = 2, and the scale c sets the privacy. A
release is ½ε_z²-zCDP (Theorem 6), with the printed sensitivity c·log2 b or the tight c√(log2 b), and ρ = ½ε_z² is converted by
δ = min_α e^{(α−1)(αρ−ε)} (1 − 1/α)^α / (α − 1) (Canonne et al. 2020, to which the paper refers). At a given ε the tight
sensitivity allows a larger c: the same release costs less.

The quantile error is (19): |H(j)/n − (1 − θ)| with H the true counts at the edge j released, so |θ' − θ| if the
(1 − θ')-quantile was found; averaged over θ = 0.1, 0.2, …, 0.9, all read off one release. ± is the standard deviation over
runs, of which the paper has 10. Part of the error is not noise: counts at neighbouring edges differ by about n/b.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.compare import Spread
from equipoise.core.rng import torch_generator
from equipoise.privacy.discrete_gaussian import concentrated_epsilon
from equipoise.privacy.private_quantile import bin_edges, client_contributions, histogram_sensitivity, quantile_of_sum
from equipoise.privacy.random_source import Seeded
from equipoise.privacy.secure_sum import SimulatedSecureSum

CLIENTS, BOUND, SIGMA, DELTA, BINS = 256, 10.0, 2.0, 1e-5, 64
TAILS = tuple(k / 10 for k in range(1, 10))
EPSILONS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0)
PLENTY = 24  # bits that no sum here leaves
Law = Literal["uniform", "chi-square"]
Sensitivity = Literal["paper", "tight"]
PUBLISHED = {1.0: 0.14, 5.0: 0.03}


def zcdp_to_epsilon(rho: float, delta: float) -> float:
    """The least ε at δ of a ρ-zCDP release, by minimising over the order α of the divergence (Canonne et al. 2020)."""
    from scipy.optimize import minimize_scalar

    def at(log_order: float) -> float:
        alpha = 1 + math.exp(log_order)
        return alpha * rho + (math.log(1 / delta) - math.log(alpha - 1) + alpha * math.log1p(-1 / alpha)) / (alpha - 1)

    return float(minimize_scalar(at, bounds=(-5, 15), method="bounded", options={"xatol": 1e-9}).fun)


@cache
def epsilon_of_scale(scale: int, bins: int, sensitivity: Sensitivity, *, simple: bool = False) -> float:
    """ε at δ = 1e-5 of one release; `simple` by ρ + 2√(ρ log 1/δ) instead."""
    change = scale * math.log2(bins) if sensitivity == "paper" else histogram_sensitivity(scale, bins)
    rho = concentrated_epsilon(change, SIGMA, CLIENTS, 2 * bins - 2) ** 2 / 2
    return rho + 2 * math.sqrt(rho * math.log(1 / DELTA)) if simple else zcdp_to_epsilon(rho, DELTA)


def scale_for(epsilon: float, bins: int, sensitivity: Sensitivity) -> int:
    """The largest scale within ε; at least 1, which may cost more."""
    scale = 1
    while epsilon_of_scale(scale + 1, bins, sensitivity) <= epsilon:
        scale += 1
    return scale


def draw_losses(law: Law, run: int) -> Tensor:
    generator = torch_generator(run, f"losses {law}")
    if law == "uniform":
        return BOUND * torch.rand(CLIENTS, generator=generator, dtype=torch.float64)
    return torch.randn(CLIENTS, 4, generator=generator, dtype=torch.float64).square().sum(1).clamp(max=BOUND)


@dataclass(frozen=True)
class Setting:
    law: Law
    scale: int  # 0: without noise
    bins: int = BINS
    bits: int = PLENTY


def errors_of_run(settings: Sequence[Setting], run: int) -> list[float]:
    """The quantile error of each setting, averaged over the tails; settings with different bits share what clients send."""
    sent: dict[Setting, Tensor] = {}
    found = []
    for setting in settings:
        losses, edges = draw_losses(setting.law, run), bin_edges(BOUND, setting.bins)
        scale, key = max(1, setting.scale), replace(setting, bits=PLENTY)
        if key not in sent:
            sent[key] = client_contributions(
                losses, bound=BOUND, bins=setting.bins, sigma=SIGMA if setting.scale else 0.0, scale=scale,
                source=Seeded(run, f"quantile {key}"),
            )  # fmt: skip
        total = SimulatedSecureSum(1 << setting.bits).sum(sent[key])
        error = 0.0
        for tail in TAILS:
            released = quantile_of_sum(total, tail, bound=BOUND, bins=setting.bins, scale=scale, clients=CLIENTS)
            below = CLIENTS if released >= edges[-1] else int((losses < released).sum())
            error += abs(below / CLIENTS - (1 - tail)) / len(TAILS)
        found.append(error)
    return found


def measure(settings: Sequence[Setting], runs: int) -> dict[Setting, Spread]:
    table = [errors_of_run(settings, run) for run in range(runs)]
    return {setting: Spread.of(row[place] for row in table) for place, setting in enumerate(settings)}


BITS_SHOWN = (10, 11, 12, 16)
BITS_RANGE = tuple(range(8, 17))
BINS_SHOWN = (16, 64, 256, 1024)
LAWS: tuple[Law, ...] = ("uniform", "chi-square")
KINDS: tuple[Sensitivity, ...] = ("paper", "tight")
LINES = (1, 2, 5, 10)  # scales of the panel by bits


def scales_drawn(bins: int, sensitivity: Sensitivity) -> list[int]:
    """About ten scales with ε up to 11."""
    return sorted({scale_for(epsilon, bins, sensitivity) for epsilon in (0.5, 0.75, *EPSILONS, 11.0)})


def settings_of_figure() -> list[Setting]:
    wanted = [Setting(law, 0) for law in LAWS]
    for law in LAWS:
        for kind in KINDS:
            wanted += [Setting(law, c, bits=bits) for c in scales_drawn(BINS, kind) for bits in (*BITS_SHOWN, PLENTY)]
        wanted += [Setting(law, c, bits=bits) for c in LINES for bits in BITS_RANGE]
        wanted += [Setting(law, c, bins=bins) for bins in BINS_SHOWN for c in scales_drawn(bins, "paper")]
    return list(dict.fromkeys(wanted))


def print_table(found: dict[Setting, Spread], runs: int) -> None:
    print(
        f"n = {CLIENTS}, b = {BINS}, σ = {SIGMA:g}, δ = {DELTA:g}, uniform on [0, {BOUND:g}], {runs} runs. Published: 0.14 at"
    )
    print("ε ≈ 1, 0.03 at ε ≈ 5, wraparound at 10 bits from ε = 5 on. ε in brackets: by ρ + 2√(ρ log 1/δ).\n")
    columns = " | ".join(f"{bits} bits" for bits in BITS_SHOWN[:3])
    print(f"| asked ε | sensitivity | c | its ε | error, ample bits | {columns} | published |\n|{'---|' * 9}")
    for epsilon in EPSILONS:
        for kind in KINDS:
            scale = scale_for(epsilon, BINS, kind)
            cost = f"{epsilon_of_scale(scale, BINS, kind):.2f} ({epsilon_of_scale(scale, BINS, kind, simple=True):.2f})"
            cells = [found[Setting("uniform", scale, bits=bits)] for bits in (PLENTY, *BITS_SHOWN[:3])]
            shown = " | ".join(f"{cell.mean:.3f} ± {cell.deviation:.3f}" for cell in cells)
            published = f"{PUBLISHED[epsilon]}" if kind == "paper" and epsilon in PUBLISHED else ""
            print(f"| {epsilon:g} | {kind} | {scale} | {cost} | {shown} | {published} |")
    for law in LAWS:
        print(f"\n{law}: without noise, the error of having to choose an edge of {BINS} is {found[Setting(law, 0)].mean:.4f}.")
        for bins in BINS_SHOWN:
            scales = scales_drawn(bins, "paper")
            row = [f"{epsilon_of_scale(c, bins, 'paper'):.2f}: {found[Setting(law, c, bins=bins)].mean:.3f}" for c in scales]
            print(f"  {bins} bins, paper's sensitivity, error by ε: {', '.join(row)}")


def draw(found: dict[Setting, Spread], path: Path, runs: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    colours = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.6), layout="constrained", sharey=True)

    def line(axis: Any, across: Sequence[float], settings: Sequence[Setting], label: str, **look: Any) -> None:
        means = torch.tensor([found[s].mean for s in settings])
        spread = torch.tensor([found[s].deviation for s in settings])
        axis.plot(across, means, marker="o", markersize=3, linewidth=1.4, label=label, **look)
        axis.fill_between(across, means - spread, means + spread, alpha=0.12, linewidth=0, color=look["color"])

    def by_scale(axis: Any, law: Law, label: str, kind: Sensitivity, colour: str, look: str = "-", **fixed: int) -> None:
        bins = fixed.get("bins", BINS)
        scales = scales_drawn(bins, kind)
        across = [epsilon_of_scale(scale, bins, kind) for scale in scales]
        line(axis, across, [Setting(law, scale, **fixed) for scale in scales], label, color=colour, linestyle=look)

    for row, law in enumerate(LAWS):
        left, middle, right = axes[row]
        for bits, colour in zip(BITS_SHOWN, colours, strict=True):
            by_scale(left, law, f"{bits} bits", "paper", colour, bits=bits)
        by_scale(left, law, "16 bits, tight sensitivity", "tight", "#333333", "--", bits=16)
        for scale, colour in zip(LINES, colours, strict=True):
            label = f"ε = {epsilon_of_scale(scale, BINS, 'paper'):.1f} (c = {scale})"
            line(middle, BITS_RANGE, [Setting(law, scale, bits=bits) for bits in BITS_RANGE], label, color=colour)
        for bins, colour in zip(BINS_SHOWN, colours, strict=True):
            by_scale(right, law, f"{bins} bins", "paper", colour, bins=bins)
        if law == "uniform":
            left.plot(list(PUBLISHED), list(PUBLISHED.values()), "k*", markersize=9, label="published", zorder=5)
        left.set_ylabel(f"{'uniform' if law == 'uniform' else 'χ²(4)'}: quantile error")
        for axis, label in ((left, "ε at δ = 1e-5"), (middle, "bits of the sum, log2 M"), (right, "ε at δ = 1e-5")):
            axis.set_xlabel(label)
            axis.grid(alpha=0.25)
            axis.set_ylim(0, 0.42)
            axis.legend(frameon=False, fontsize=8)
    axes[0, 0].set_title(f"{BINS} bins, by bits")
    axes[0, 1].set_title(f"{BINS} bins, by ε")
    axes[0, 2].set_title("ample bits, by bins")
    title = f"Private quantile of {CLIENTS} losses, σ = {SIGMA:g}, {runs} runs; the paper's sensitivity where no other is named"
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10, help="10 in the paper")
    parser.add_argument("--out", type=Path, default=Path("docs/images/private_quantile.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(settings_of_figure(), options.runs)
    print_table(found, options.runs)
    draw(found, options.out, options.runs)
    print(f"\nWritten: {options.out}")


if __name__ == "__main__":
    main()
