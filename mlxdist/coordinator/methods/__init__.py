"""SFT, DPO and KTO: what each asks of the nodes and makes of their answers."""
