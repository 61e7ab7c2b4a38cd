"""When to measure, never what: hooks on the optimizer's step and on modules, and the record that they fill."""
