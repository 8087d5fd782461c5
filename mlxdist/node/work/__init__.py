"""The jobs of a worker: the model, a leaf's gradient or score, the partial sums."""
