"""A trained model in use: one folder or zip with the model, how to read records, the statement and who signed it."""
