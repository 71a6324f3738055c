"""A model for every client beside the shared one."""

from equipoise.personal.ditto import L2SGD, Ditto, Local
from equipoise.personal.finetune import Finetuning

__all__ = ["L2SGD", "Ditto", "Finetuning", "Local"]
