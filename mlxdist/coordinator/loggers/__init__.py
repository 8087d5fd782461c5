"""Loggers: TensorBoard, Weights & Biases and trackio get a run's metrics, each from a process of its own."""
