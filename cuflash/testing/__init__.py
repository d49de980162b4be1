"""Oracle, cases and checks that tests, benchmark and self-test share."""
