"""What the parties of a run sign of it, and how anybody checks ledgers, statements and models against that."""
