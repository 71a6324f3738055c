"""Malicious clients: `apply` marks them in the data; each attack says what they do to their data and what they send."""

from equipoise.attacks.backdoor import Backdoor
from equipoise.attacks.colluding import ALIE, IPM, Mimic, MinMax
from equipoise.attacks.malicious import Sent, apply, malicious_clients
from equipoise.attacks.single import LabelFlip, LabelPoisoning, ModelReplacement, RandomUpdates, SignFlip

__all__ = [
    "ALIE",
    "IPM",
    "Backdoor",
    "LabelFlip",
    "LabelPoisoning",
    "Mimic",
    "MinMax",
    "ModelReplacement",
    "RandomUpdates",
    "Sent",
    "SignFlip",
    "apply",
    "malicious_clients",
]
