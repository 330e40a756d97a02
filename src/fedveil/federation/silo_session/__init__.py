"""The silo's side of a session: check the statement, charge the ledger, train, contribute, and sign."""
