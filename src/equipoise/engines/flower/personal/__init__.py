"""Personal models over a network: they are trained and kept on the nodes."""
