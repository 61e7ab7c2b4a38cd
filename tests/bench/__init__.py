"""What monitoring costs: ``make bench``, or ``python -m tests.bench --help``.

Every case trains the very same weights, in turns and in shuffled order, in one process: a comparison within a round is free of
what the machine does over minutes. ``again`` is the unmonitored training once more, so its distance from ``none`` is the noise.

Composer's OptimizerMonitor is not among the cases: mosaicml 0.32.1, the newest release, asks for torch below 2.7.1, and these
figures are from torch 2.13.
"""
