"""SFT, DPO and KTO: their rounds over the cluster, and the metrics of a step."""
