"""Records by silo and user: allocation of records, tables and their schemas, the catalogue of data sets."""
