"""A node's two processes: the supervisor, and the worker with the model and the backward."""
