"""What is measured and checked: the case table, and the benchmark that runs on it."""
