"""What monitoring costs, measured."""
