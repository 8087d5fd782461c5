"""mlxdist: fine-tune one language model on several Macs, with the result of one machine.

The map (imports only go down):

    mlxdist.cli           the commands
    mlxdist.coordinator   configuration, data, order, leaves, summing, stepping, saving
    mlxdist.node          supervisor, worker, model, backward
    mlxdist.protocol      messages, the sum tree, objectives, hashes; no sockets, no files
"""

__version__ = "0.1.0"
