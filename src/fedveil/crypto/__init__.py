"""Cryptographic parts, thin and typed, with no federation in them.

Ciphers, signatures and curves come from ``cryptography``; Paillier and oblivious transfer are modular arithmetic over
``gmpy2``; ring-LWE comes from SEAL through ``tenseal.sealapi``. Nothing here knows what a silo is.
"""
