"""Parts for Flower apps of your own: mods for the ClientApp, strategies for the ServerApp; needs flwr."""
