"""CURVE keys: pairs, their files, and the store of nodes and coordinators that are known. No sockets."""
