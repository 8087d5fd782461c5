"""The trained model on this machine: questions to it, and its export. These commands load the parameters themselves."""
