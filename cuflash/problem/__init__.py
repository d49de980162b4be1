"""*What* is asked: arguments are judged here, and nowhere else, and become one frozen `Problem`."""
