"""Planning of calls: devices, tile tables, one planner for each op. All functions are pure, except in `device.py`."""
