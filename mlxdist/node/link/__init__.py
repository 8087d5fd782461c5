"""The worker's half of the data connection, and a node's sockets."""
