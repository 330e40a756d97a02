"""Provide cryptographic primitives: keys, encryption, masks, secret sharing, homomorphic ciphers.

Ciphers, signatures and curves come from ``cryptography``. Paillier and oblivious transfer are modular arithmetic over
``gmpy2``. Ring-LWE comes from SEAL through ``tenseal.sealapi``. No module of this package depends on silos or
federations.
"""
