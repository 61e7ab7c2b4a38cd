"""Parity: the same training, sharded and unsharded, must export the same values."""
