"""Protocols that limit what the server sees, as state machines over byte messages that do no input or output.

Each party is an object that takes and gives bytes; what carries them (one process, a test, a network) is the caller's
business. :mod:`fedveil.protection.driver` plays whole rounds in one process.
"""
