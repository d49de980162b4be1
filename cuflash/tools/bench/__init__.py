"""The benchmark: problems, peers, measurement, tables and pictures."""
