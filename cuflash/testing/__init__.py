"""The oracle, the cases and the checks that tests, benchmark and self-test share."""
