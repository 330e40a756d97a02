"""The parties of a federation as processes on their hosts: services, sockets, folders, settings, status.

The coordinator's host has two processes: the party, with the identity key and the run folders, and the link, the
mailbox that the network reaches, with the TLS key. A silo's host has two as well: the key process, with the identity
key, the table and the ledger, and the network process, with the TLS client key.
"""
