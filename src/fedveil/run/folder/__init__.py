"""What a run leaves behind: its files, how they are written so that no kill loses a round, and how they are read."""
