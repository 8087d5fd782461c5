"""The worker's work: the model, a leaf's gradient or score, the partial sums."""
