"""Federated runs with Flower: an engine whose clients are the nodes of a Flower federation.

`server_app(algorithm, model=…, rounds=…)` and `client_app(model=…, load_data=…)` make the two apps of a Flower project; Flower
itself is imported when they are called, and is the extra `equipoise[flower]`.
"""

import logging

from equipoise.core.words import clean_record
from equipoise.engines.flower.apps.client import client_app
from equipoise.engines.flower.apps.server import server_app

__all__ = ["client_app", "server_app"]

for _name in ("flwr", "equipoise.node"):  # what servers and nodes say of each other
    logging.getLogger(_name).addFilter(clean_record)
