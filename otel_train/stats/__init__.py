"""Statistics on the device: tensors in, small tensors out, and the host arithmetic that turns read-out sums into values.

Nothing here reads a device value on the host; functions that take floats are the host side and say so in their names or arguments.
"""
