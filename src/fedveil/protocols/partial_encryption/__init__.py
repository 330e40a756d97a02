"""Partial encryption (ParaAegis): voted coordinates travel encrypted, the others in clear with their noise."""
