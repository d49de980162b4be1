"""*What* is computed: arguments are validated here, and nowhere else, and become one frozen `Problem`."""
