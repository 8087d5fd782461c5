"""mlxdist: fine-tune one language model on several Macs, with the numbers of one machine.

The map of the house (imports only go down):

    mlxdist.cli           the commands
    mlxdist.coordinator   upper floor: configuration, data, order, leaves, summing, stepping, saving
    mlxdist.node          upper floor: supervisor, worker, model, backward
    mlxdist.protocol      ground floor: messages, the sum tree, objectives, hashes; no sockets, no files
"""

__version__ = "0.1.0"
