"""Protocols that limit what the server sees, as state machines over byte messages that do no input or output.

Each party is an object that accepts and returns bytes; the caller transports them (in one process, a test, or over a
network). :mod:`fedveil.protocols.driver` runs whole rounds in one process.
"""
