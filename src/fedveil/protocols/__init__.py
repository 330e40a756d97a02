"""Cryptographic protocols that limit what the server sees, as state machines over byte messages.

Each party is an object that accepts and returns bytes. The parties do no input or output: the caller carries the
bytes, in one process, in a test, or over a network. :mod:`fedveil.protocols.driver` plays whole rounds in one
process.
"""
