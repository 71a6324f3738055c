"""Fine-tune a small decoder with LoRA adapters on Shakespeare by role: FedAvg, Δ-FL, and Δ-FL under client-level privacy.

    python examples/adapters_on_shakespeare.py [--data FOLDER] [--roles 40] [--rounds 30]

The decoder is built from a configuration of transformers, so that nothing is downloaded, and reads bytes. Clients are roles;
FOLDER holds shakespeare_roles.json.gz, and without it a few lines made here stand for the plays. Only the adapters are trained
and travel. Needs pip install "equipoise[peft]".
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import equipoise as eq
from equipoise.models import language

LENGTH = 48  # bytes of the longest example
MADE = {  # a few roles of a play that nobody wrote
    "miller": ["the wheel turns slow, the water low,", "and grain is gold in a year of snow.", "bring me the sack."],
    "fool": ["ha! a king with a cold is a cold king.", "i sing because the bird will not.", "a crown? a hat with pains."],
    "queen": ["let the gates be shut before the night.", "who counts the cost of a borrowed crown?", "speak, and be brief."],
    "ghost": ["remember the well, remember the stone.", "i was the third of three.", "the bell, the bell, the bell."],
    "captain": ["hold the line! the river is at our back.", "two by two across the ford.", "no man sleeps till the sun is up."],
    "cook": ["more salt, more salt, and less of the moon.", "a goose for the duke, the neck for me.", "stir it, stir it."],
}


def make_data(folder: str | Path | None = None, roles: int = 40, seed: int = 0) -> eq.FederatedData:
    """One client per role; each speech in pieces of at most `LENGTH` bytes. A quarter of the roles are unseen in training."""
    clients = []
    for name, lines in read_roles(folder, roles):
        text = [line.encode()[i : i + LENGTH] for line in lines for i in range(0, len(line.encode()), LENGTH)]
        tokens = [torch.tensor(list(piece)) for piece in text if len(piece) > 1]
        clients.append((name, {"input_ids": eq.data.Ragged.of(tokens)}, eq.data.Ragged.of(tokens, pad=language.IGNORED)))
    everyone = eq.ClientSet.pack(clients, source="shakespeare by role")
    return eq.data.split_clients(everyone, test=0.25, seed=seed, name="shakespeare by role", classes=256)


def read_roles(folder: str | Path | None, count: int) -> Iterable[tuple[str, list[str]]]:
    """The name and the speeches of the roles that speak most, or of the made ones."""
    if folder is None:
        return MADE.items()
    with gzip.open(Path(folder) / "shakespeare_roles.json.gz", "rt", encoding="utf-8") as file:
        roles = json.load(file)["roles"]
    roles.sort(key=lambda role: -sum(len(line) for speech in role["speeches"] for line in speech))
    return [(f"{r['play']}: {r['role']}", [" ".join(speech) for speech in r["speeches"]][:100]) for r in roles[:count]]


def make_model(seed: int = 0) -> nn.Module:
    """A decoder of two layers over bytes, frozen but for LoRA adapters on its attention."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        decoder = LlamaForCausalLM(config)
        return get_peft_model(decoder, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def private_model(seed: int = 0) -> nn.Module:
    """The model with the A of its adapters frozen, as differential privacy wants it on every node of a federation."""
    return eq.models.freeze_lora_a(make_model(seed))


TASK = {
    "loss": language.next_token_loss, "error": language.next_token_error, "metrics": {"perplexity": language.perplexity},
}  # fmt: skip


def make_methods(lr: float = 0.5, bound: float = 8.0) -> dict[str, eq.Algorithm]:
    """FedAvg, Δ-FL, and Δ-FL with client-level differential privacy."""
    solver = eq.solvers.SGD(lr=lr, batch_size=8)
    quantile = eq.privacy.PrivateQuantile(bound=bound, bins=16)
    privacy = eq.privacy.DifferentialPrivacy(epsilon=8.0, delta=0.02, clip=0.5, quantile_ratio=0.25)
    return {
        "FedAvg": eq.Algorithm(solver=solver),
        "Δ-FL 0.5": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5), solver=solver),
        "Δ-FL 0.5, ε = 8": eq.Algorithm(
            risk=eq.risk.Superquantile(tail=0.5, quantile=quantile), solver=solver, privacy=privacy
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder of shakespeare_roles.json.gz; without it a few made roles")
    parser.add_argument("--roles", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    data = make_data(given.data, given.roles)
    per_round = max(2, len(data.train) // 3)
    compared = eq.compare(
        make_methods(), make_model, data, rounds=given.rounds, clients_per_round=per_round, engine="loop", **TASK
    )  # fmt: skip
    print(compared.summary())
    for name, (result,) in compared.results.items():
        rows = sorted(result.clients.where("test"), key=lambda row: -row["perplexity"])
        print(f"\n{name}: perplexity of unseen roles")
        print("\n".join(f"  {row['perplexity']:8.1f}  {row['client']}" for row in rows))


if __name__ == "__main__":
    main()
