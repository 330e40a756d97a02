"""Partial encryption (ParaAegis): voted coordinates encrypted, the others in the clear with noise."""
