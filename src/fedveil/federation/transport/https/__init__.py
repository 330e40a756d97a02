"""The built-in transport: HTTPS with a client certificate for each silo, and long polling; needs h11 and httpcore."""
