"""The Flower apps: the server, a node, and the project that `equipoise flower init` writes."""
