"""Partial encryption (ParaAegis): voted coordinates are sent encrypted, the others in the clear with noise."""
