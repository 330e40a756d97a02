"""The commands, a module for those that need the same things; :mod:`fedveil.cli.app` imports each when it is used."""
