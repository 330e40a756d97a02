"""The run folder: its files, their documents, and how they are written durably."""
