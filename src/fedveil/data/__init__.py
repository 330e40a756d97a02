"""Records by silo and user: tables, schemas, allocation, and the catalogue of data sets."""
