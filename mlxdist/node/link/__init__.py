"""The worker's half of the protocol and the node's sockets."""
