"""A node: it works on its own data and answers the server. What its owner refuses is in policy.toml on the node."""

from equipoise.engines.flower import client_app

from .data import load_data
from .task import net

app = client_app(model=net, load_data=load_data)
