"""Threads, sockets and processes around the cluster."""
