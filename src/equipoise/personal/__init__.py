"""A model for every client beside the shared one."""

from equipoise.personal.ditto import L2SGD, Ditto, Local
from equipoise.personal.finetune import Finetuning
from equipoise.personal.interpolate import APFL, Mapper
from equipoise.personal.mocha import Mocha
from equipoise.personal.regularise import EWC, SymmetrisedKL

__all__ = ["APFL", "EWC", "L2SGD", "Ditto", "Finetuning", "Local", "Mapper", "Mocha", "SymmetrisedKL"]
