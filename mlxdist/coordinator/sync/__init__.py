"""An equal environment and the model on every host: downloaded once, copied over ssh, installed offline."""
