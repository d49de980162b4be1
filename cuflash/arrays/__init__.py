"""*Whose* arrays: one file for each array library, which reads its arrays and makes new ones."""
