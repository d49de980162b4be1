"""*How* a problem would run: devices, tiles, a planner for each kind of call. All but `device.py` is pure functions."""
