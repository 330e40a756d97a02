"""Who holds what: records over silos and users, their allocation, users' own tables, the data sets."""
