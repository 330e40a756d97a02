"""What a silo does for itself in a session: it weighs, charges, trains, gives, and signs what it has computed again."""
