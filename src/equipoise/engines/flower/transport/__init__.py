"""What travels between the server and the nodes, and how it is sent."""
