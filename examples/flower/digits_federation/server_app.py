"""The server: it has no data. It asks the nodes, keeps the model, and leaves a run folder with a report."""

from equipoise.engines.flower import server_app

from .task import algorithm, net

# Rounds, folder and more are in pyproject.toml, and can be changed for one run.
app = server_app(algorithm, model=net, rounds=4, clients_per_round=4)
