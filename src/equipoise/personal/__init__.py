"""A model for every client beside the shared one."""

from equipoise.personal.ditto import L2SGD, Ditto, Local
from equipoise.personal.finetune import Finetuning
from equipoise.personal.interpolate import APFL, Mapper
from equipoise.personal.mocha import Mocha
from equipoise.personal.pfedme import PFedMe
from equipoise.personal.regularise import EWC, SymmetrisedKL
from equipoise.personal.split import FedBABU, FedBN, FedPer, FedRep, LGFedAvg, Split

__all__ = [
    "APFL",
    "EWC",
    "L2SGD",
    "Ditto",
    "FedBABU",
    "FedBN",
    "FedPer",
    "FedRep",
    "Finetuning",
    "LGFedAvg",
    "Local",
    "Mapper",
    "Mocha",
    "PFedMe",
    "Split",
    "SymmetrisedKL",
]
